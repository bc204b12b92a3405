"""Measure rl_rpc's mode vector beside TorchRL's RPCCollector and the env runners of Ray's RLlib: steps per second.

    pip install -r requirements.txt torchrl==0.14.1 "ray[rllib]==2.60.0" gymnasium==1.2.2
    python bench/rl_peers.py                             # six minutes on 2 cores

In every row two processes play CartPole with a policy of 128 hidden units. A third process sends them the weights
before each round, and receives all steps. `vector` also learns from them, in float64, in 250 updates from seed 1. The
peers only collect, in float32, with an untrained policy. RLlib steps its games together, in gymnasium's vector class,
as `vector` does. TorchRL refuses this class, and steps its games one after the other. Start-up does not count.
"""

import functools
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from common import argument_parser, compare, run_main, write_json

try:
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from tensordict.nn import TensorDictModule
    from torchrl.collectors.distributed import RPCCollector
    from torchrl.envs import GymEnv, SerialEnv
    from torchrl.modules import ProbabilisticActor
except ImportError as error:
    sys.exit(f"rl_peers.py: {error}. Its first lines say how to install the peers.")

PLAYERS, STEPS, SECONDS = 2, 100, 5  # STEPS: of each game in a round of a peer


def torchrl(games):
    env = functools.partial(SerialEnv, games, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
    net = torch.nn.Sequential(torch.nn.Linear(4, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2))
    scores = TensorDictModule(net, ["observation"], ["logits"])
    policy = ProbabilisticActor(scores, in_keys=["logits"], distribution_class=torch.distributions.Categorical)
    frames = {"frames_per_batch": PLAYERS * games * STEPS, "total_frames": PLAYERS * games * STEPS * 10**6}
    collector = RPCCollector([env] * PLAYERS, policy, **frames, launcher="mp", sync=True, update_after_each_batch=True)
    batches = iter(collector)
    figures = speed(lambda: next(batches).numel())
    collector.shutdown()
    return figures


def rllib(games):
    config = PPOConfig().environment("CartPole-v1").training(train_batch_size_per_learner=PLAYERS * games * STEPS)
    config.env_runners(num_env_runners=PLAYERS, num_envs_per_env_runner=games, rollout_fragment_length=STEPS)
    config.env_runners(gym_env_vectorize_mode="vector_entry_point")
    config.rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[128], fcnet_activation="relu"))
    runners = config.build_algo().env_runner_group

    def play_round():
        runners.sync_weights(inference_only=True)
        played = runners.foreach_env_runner(lambda runner: runner.sample(), local_env_runner=False)
        return sum(len(episode) for episodes in played for episode in episodes)

    return speed(play_round)


def speed(play_round):
    play_round()  # returns how many steps came; the first round does not count
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        steps += play_round()
    return {"env_steps_per_second": steps / (time.perf_counter() - started)}


def in_new_process(peer, games):  # which ends what the peer has started
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(peer, games).result()


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--games", type=int, nargs="+", default=[8, 32], metavar="N", help="a table for each")
    args = parser.parse_args()
    words = f"--mode vector --world_size 3 --seed {args.seed} --max_episodes 250 --reward_threshold 1e9 --games"
    tables = {}
    for games in args.games:
        variants = {"vector": functools.partial(run_main, "rl_rpc", *words.split(), games)}
        variants |= {peer.__name__: functools.partial(in_new_process, peer, games) for peer in (torchrl, rllib)}
        tables[games] = compare(variants, args, "env_steps_per_second", "vector", f"steps per second, {games} games")
    write_json(args.json, tables)


if __name__ == "__main__":
    main()
