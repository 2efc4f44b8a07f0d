"""`transformers serve` runs an export by the script of docs/exports.md, for the `openai` client."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fla_train.hub.export import export_model
from fla_train.models import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.long


@pytest.fixture
def model() -> DeltaProductForCausalLM:
    """Gated DeltaProduct, n_h = 2."""
    torch.manual_seed(0)
    size = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 16}
    settings = {"num_householder": 2, "use_forget_gate": True, "initializer_range": 0.3}
    return DeltaProductForCausalLM(DeltaProductConfig(**size, **settings)).eval()


def listening(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("localhost", port)) == 0


@pytest.fixture
def client(model, tokenizer, tmp_path: Path) -> Iterator["openai.OpenAI"]:
    """Of a server that has the model's export in `tmp_path / "export"`."""
    folder = export_model(model, tokenizer, tmp_path / "export")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    page = (Path(__file__).parents[2] / "docs/exports.md").read_text()
    (tmp_path / "serve.py").write_text(re.search(r"```python\n(# serve.py.*?)```", page, re.S)[1])
    command = [sys.executable, tmp_path / "serve.py", "serve", str(folder)]
    options = ["--trust-remote-code", "--device", "cpu", "--port", str(port)]
    offline = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            command + options, env=os.environ | offline, cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        while not listening(port):
            assert server.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        yield openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0)
    finally:
        server.kill()
        server.wait()


@torch.no_grad()
def test_completions_whole_and_streamed(client, model, tokenizer, tmp_path: Path):
    prompt = tokenizer("Hello", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos_token_id)
    expected = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    request = {"model": str(tmp_path / "export"), "prompt": "Hello", "max_tokens": 8, "temperature": 0}
    assert client.completions.create(**request).choices[0].text == expected
    chunks = client.completions.create(**request, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
