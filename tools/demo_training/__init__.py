"""Parts of `tools/train_demo.py`."""
