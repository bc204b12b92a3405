"""rnn_rpc's differences from the tutorial that concern the model and one training step.

In most tests the process `trainer` is also its own parameter server, because a worker may call itself.
"""

import math

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn

from helpers import load_oracle

oracle = load_oracle("rnn_rpc")
as_launched = oracle.as_launched  # a fixture
logits, trainer = oracle.logits, oracle.trainer
pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using a Backend"),
    pytest.mark.xdist_group("rnn_rpc"),
    pytest.mark.quick,
]
V, E, H, T, B = 10, 4, 6, 5, 3
MODES = oracle.main.MODES


def new_model(dropout=0.0, mode="logits", servers=("trainer",)):
    devices = dict.fromkeys(("trainer", *servers), "cpu")
    return MODES[mode].RNNModel(MODES[mode].Decoder, servers, V, E, H, 2, dropout, seed=1, devices=devices)


def new_trainer(clip=0.0, rnn_model=None):
    return trainer.Trainer(rnn_model or new_model(), "sgd", 0.1, clip, seed=1)


def model_on_two_servers(mode="logits"):
    """Return a model whose table and decoder are in two other processes."""
    return new_model(mode=mode, servers=("server1", "server2"))


def batch():
    ids = torch.randint(V, (T + 1, B), generator=torch.Generator().manual_seed(1))
    return ids[:-1], ids[1:]


def test_the_loss_is_taken_over_the_vocabulary():
    """Difference 4: CrossEntropyLoss expects the classes on axis 1, which is the axis of the streams in (T, B, V).

    The published call has targets of shape (T, V). It raises no error, and its classes are the streams.
    """
    model, (data_TB, target_TB) = new_model(), batch()
    logits_TBV, _ = model(data_TB, model.init_hidden(B))
    assert logits_TBV.shape == (T, B, V)
    published = nn.CrossEntropyLoss()(logits_TBV, torch.randint(B, (T, V)))  # no error, and near ln B
    assert published.item() == pytest.approx(math.log(B), abs=0.1)
    loss, _ = model.summed_loss(data_TB, target_TB, model.init_hidden(B))
    assert loss.item() / (T * B) == pytest.approx(math.log(V), abs=0.1)


@pytest.mark.parametrize("num_streams", [1, 3])
def test_two_halves_of_any_number_of_streams_are_the_whole(num_streams):
    data_TB, target_TB = (ids[:, :num_streams].contiguous() for ids in batch())
    results = []
    for mode in ("loss", "overlap"):
        trainer = new_trainer(rnn_model=new_model(mode=mode))
        loss, hidden = trainer.train_step(data_TB, target_TB, trainer.model.init_hidden(num_streams))
        results.append([loss, hidden, trainer.model.state_dict()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_eval_reaches_the_remote_layers():
    """Difference 9: the eval() of nn.Module has no effect in another process, because an RRef is not a submodule.

    Difference 10: nor has the trainer's torch.no_grad(). After eval() a server builds no graph.
    """
    model, (data_TB, _) = new_model(dropout=0.5), batch()
    table, decoder = layers = [rref.local_value() for rref in (model.emb_table_rref, model.decoder_rref)]
    nn.Module.train(model, False)  # as the tutorial's model would do in eval()
    assert all(layer.training for layer in layers) and table(data_TB).requires_grad
    model.eval()
    assert not any(layer.training for layer in layers) and not model.rnn.training
    assert not table(data_TB).requires_grad and not decoder(torch.zeros(T, B, H)).requires_grad
    model.train()
    assert all(layer.training for layer in layers) and model.rnn.training


def test_switching_the_mode_sends_no_parameters():
    """Difference 9: a call of train() by RPC would send the whole module back."""
    model = new_model()
    assert isinstance(model.decoder_rref.rpc_sync().train(), logits.Decoder)
    assert model.decoder_rref.rpc_sync().set_training(True) is None


@pytest.mark.parametrize("mode", ["logits", "loss"])
def test_dropout_is_torchs_own(mode):
    """Here trainer and server are one process, with one generator: the layers draw in the order of one process."""
    rnn_model, (data_TB, target_TB) = new_model(dropout=0.3, mode=mode), batch()
    table, decoder = (rref.local_value() for rref in (rnn_model.emb_table_rref, rnn_model.decoder_rref))
    torch.manual_seed(5)
    found, _ = rnn_model.summed_loss(data_TB, target_TB, rnn_model.init_hidden(B))
    torch.manual_seed(5)
    drop = nn.Dropout(0.3)
    rnn = nn.LSTM(E, H, 2, dropout=0.3)
    rnn.load_state_dict(rnn_model.rnn.state_dict())
    torch.manual_seed(5)
    output_TBH, _ = rnn(drop(table.encoder(data_TB)), rnn_model.init_hidden(B))
    scores_TBV = decoder.decoder(drop(output_TBH))
    expected = nn.functional.cross_entropy(scores_TBV.flatten(0, 1), target_TB.flatten(), reduction="sum")
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def gradients_on(worker, context_id):
    return list(rpc.rpc_sync(worker, dist_autograd.get_gradients, args=(context_id,)).values())


def test_clipping_takes_the_norm_of_all_workers():
    """Difference 12: clip_grad_norm_ would see the LSTM's parameters only, and gradients of the last training step."""
    rnn_model, (data_TB, target_TB) = model_on_two_servers(), batch()
    trainer = new_trainer(clip=0.01, rnn_model=rnn_model)

    def norm(context_id, workers=("server1", "trainer", "server2")):
        gradients = [gradient for worker in workers for gradient in gradients_on(worker, context_id)]
        return math.sqrt(sum(gradient.square().sum() for gradient in gradients))

    with dist_autograd.context() as context_id:
        loss, _ = rnn_model.summed_loss(data_TB, target_TB, rnn_model.init_hidden(B))
        dist_autograd.backward(context_id, [loss])
        before = norm(context_id)
        assert before > 0.02 and norm(context_id, ["trainer"]) < 0.9 * before
        trainer.clip_gradients(context_id)
        assert norm(context_id) == pytest.approx(0.01, rel=1e-3)
        trainer.clip_gradients(context_id)  # small enough, so unchanged
        assert norm(context_id) == pytest.approx(0.01, rel=1e-3)


def gradients_of_an_asynchronous_call(after_a_synchronous_one):
    """Return how many gradients the decoder's owner has after backward(): 2 (of weight and bias), or 0."""
    rnn_model, (_, target_TB) = model_on_two_servers("loss"), batch()
    if after_a_synchronous_one:
        rnn_model.parameter_rrefs()
    with dist_autograd.context() as context_id:
        loss = rnn_model.decoder_rref.rpc_async().summed_loss(torch.ones(T, B, H), target_TB).wait()
        dist_autograd.backward(context_id, [2 * loss])
        return len(gradients_on("server2", context_id))


def test_the_first_asynchronous_call_through_an_rref_is_outside_the_autograd_context():
    """Difference 7: there is no error, but the decoder's owner gets no gradient.

    In training, parameter_rrefs makes a synchronous call before, so the later calls are in the context.
    """
    # Three times, because sometimes the type arrives so early that this thread makes the call, in the context.
    assert 0 in [gradients_of_an_asynchronous_call(after_a_synchronous_one=False) for _ in range(3)]
    assert [gradients_of_an_asynchronous_call(after_a_synchronous_one=True) for _ in range(3)] == [2, 2, 2]


def test_a_resumed_run_has_the_learning_rate_of_its_own_flag():
    first = trainer.Trainer(new_model(), "adam", 8.0, 0.0, seed=1)
    first.train_step(*batch(), first.model.init_hidden(B))
    resumed = trainer.Trainer(new_model(), "adam", 16.0, 0.0, seed=1)
    resumed.load_state_dict(first.state_dict())
    optimizer = resumed.optimizer_rrefs["trainer"].local_value().optim
    assert [group["lr"] for group in optimizer.param_groups] == [16.0]
    assert {values["step"].item() for values in optimizer.state.values()} == {1.0}
    assert resumed.step == 1


def test_an_evaluation_is_without_dropout_on_every_worker():
    """This holds right after training too. The hidden state of a batch is the start of the next batch."""
    trained = [new_trainer(rnn_model=new_model(dropout, "loss")) for dropout in (0.5, 0.0)]
    losses = []
    for each in trained:
        each.model.train()
        losses.append(each.evaluate([batch(), batch()], B))
    assert losses[0] == losses[1]
    data_TB, target_TB = batch()
    with torch.no_grad():
        model = trained[1].model
        first, hidden = model.summed_loss(data_TB, target_TB, model.init_hidden(B))
        second, _ = model.summed_loss(data_TB, target_TB, hidden)  # continues from the first batch
    assert losses[1] == pytest.approx((first.item() + second.item()) / (2 * T * B), rel=1e-6)


def test_a_generated_text_goes_on_from_its_own_past_and_without_dropout():
    """Each token is drawn from the scores that a model without dropout computes from all tokens before it."""
    writer = new_trainer(rnn_model=new_model(dropout=0.9))
    plain = new_model(dropout=0.0)
    for rnn_model in (writer.model, plain):
        for rref in rnn_model.parameter_rrefs():
            rref.local_value().data.mul_(10)  # larger scores, so that the drawn tokens depend on them
    writer.model.train()
    ids = writer.generate(50)

    generator = torch.Generator().manual_seed(trainer.seed_for(1, "generate"))
    first = torch.randint(V, (1, 1), generator=generator).item()
    past_TB = torch.tensor([first, *ids[:-1]]).unsqueeze(1)
    plain.eval()
    logits_TBV, _ = plain(past_TB, plain.init_hidden(1))
    expected = [torch.multinomial(scores.softmax(-1), 1, generator=generator).item() for scores in logits_TBV[:, 0]]
    assert ids == expected
