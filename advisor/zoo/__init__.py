"""Well-known networks as plain PyTorch modules, so that published runs that only name their model can be priced.

Each module of this package holds one family, written from its published architecture; nothing here is meant for training.
"""
