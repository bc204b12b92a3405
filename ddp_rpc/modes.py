"""The modes: three ways to train a HybridModel.  Runs in every process."""

from averaged_trainer import AveragedTraining
from pipelined_trainer import PipelinedTraining
from sync_trainer import SyncTraining

# The name of each mode, and the class whose step(batch, next_batch) trains on one batch.  The first is the tutorial's.
MODES = {"sync": SyncTraining, "averaged": AveragedTraining, "pipelined": PipelinedTraining}
