"""The ways to train a HybridModel."""

from sync_trainer import MODES

__all__ = ["MODES"]
