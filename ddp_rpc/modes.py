"""The modes: three ways to train a HybridModel."""

from averaged_trainer import AveragedTraining
from pipelined_trainer import PipelinedTraining
from sync_trainer import SyncTraining

# Name of a mode -> the class whose step(batch, next_batch) trains on one batch in it; the tutorial's is the first.
MODES = {"sync": SyncTraining, "averaged": AveragedTraining, "pipelined": PipelinedTraining}
