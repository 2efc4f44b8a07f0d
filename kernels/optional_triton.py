"""Triton, if it is installed. Without it kernels are defined but cannot run, and the PyTorch backends do.

Modules of kernels import `triton` and `tl` from here: torch for macOS, Windows and CPUs comes without Triton.
"""

try:
    import triton
    import triton.language as tl

    INSTALLED = True
except ImportError:

    class _Placeholder:
        """Answer the decorators, annotations and constants by which a module defines its kernels."""

        def __getattr__(self, name: str) -> "_Placeholder":
            return self

        def __call__(self, *arguments: object, **options: object) -> "_Placeholder":
            return self

    triton = tl = _Placeholder()
    INSTALLED = False

__all__ = ["INSTALLED", "tl", "triton"]
