"""The flags of main.py on which a step depends."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Plan:
    """What rank 0 tells the servers and the trainers of the flags. An attribute has the name of its flag."""

    world_size: int
    seed: int
    num_servers: int
    dataset: str
    batch_size: int
    lr: float  # of the first epoch
    momentum: float
    no_dropout: bool
    max_staleness: int  # of mode `bounded`
    num_gpus: int | None  # of mode `remote`
    log_interval: int
