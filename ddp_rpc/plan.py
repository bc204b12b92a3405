"""The flags of main.py on which a training step or an evaluation depends."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the master tells the trainers of the flags. An attribute has the name of its flag."""

    seed: int
    num_embeddings: int
    embedding_dim: int
    targets: str
    batch_bags: int
    batches: int
    epochs: int
    lr: float
    log_interval: int
