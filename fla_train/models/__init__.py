"""Language models of this package.

- `modeling`, `layers`, `mixers`, `cache`, `context` and `loss` implement the DeltaProduct family, which
  `settings` and `configuration` describe.
- `auto` registers all models with transformers' Auto classes.
- `decoding` generates tokens in CUDA graphs; `float8` trains in float8.
- `flops` counts parameters, FLOPs and bytes.
- `zoo` adds models of other libraries; `build` makes a model from a `model` node of a config.

Importing the package imports none of them, because transformers' modeling code takes seconds to import.
"""
