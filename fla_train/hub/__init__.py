"""Checkpoints as folders in the Hugging Face format.

- `checkpoint_config` finds them and reads their configs and training records, `load` loads them.
- `export` writes them, `convert` changes their format or dtype.
- `push` uploads one to the Hub, `pushes` does so during training.
- `formats` translates the checkpoints of other libraries.

Importing the package imports none of these modules, because the launcher of a run needs only the light ones.
"""
