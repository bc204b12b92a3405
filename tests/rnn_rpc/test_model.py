"""rnn_rpc's differences from the tutorial that concern the model and one training step.

In most tests the process `trainer` is also its own parameter server, because a worker may call itself.
"""

import math
import sys

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn

from helpers import package_on_path

with package_on_path("rnn_rpc"):
    import keyed_dropout
    import model
    import owners
    import progress
    import remote_layers
    import trainer

pytestmark = pytest.mark.filterwarnings("ignore:You are using a Backend")
V, E, H, T, B = 10, 4, 6, 5, 3


@pytest.fixture(scope="module", autouse=True)
def as_launched(rpc_group):
    """Make the modules importable by their names, as in a rank that glue/launch.py has started."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (keyed_dropout, owners, remote_layers):  # RPC pickles classes by their module's name
            patch.setitem(sys.modules, module.__name__, module)
        yield


def new_model(dropout=0.0):
    return model.RNNModel(["trainer"], V, E, H, 2, dropout, seed=1)


def new_trainer(clip=0.0, lr=0.1, rnn_model=None):
    return trainer.Trainer(rnn_model or new_model(), "logits", "sgd", lr, clip, seed=1)


def model_on_two_servers():
    """Return a model whose table and decoder are in two other processes."""
    return model.RNNModel(["ps0", "ps1"], V, E, H, 2, 0.0, seed=1)


def batch():
    ids = torch.randint(V, (T + 1, B), generator=torch.Generator().manual_seed(1))
    return ids[:-1], ids[1:]


def test_the_loss_is_taken_over_the_vocabulary():
    """Difference 4: CrossEntropyLoss expects the classes on axis 1, which is the axis of the streams in (T, B, V).

    The published call has targets of shape (T, V).  It raises no error, and its classes are the streams.
    """
    model, (data_TB, target_TB) = new_model(), batch()
    logits_TBV, _ = model(data_TB, model.init_hidden(B))
    assert logits_TBV.shape == (T, B, V)
    published = nn.CrossEntropyLoss()(logits_TBV, torch.randint(B, (T, V)))  # no error, and near ln B
    assert published.item() == pytest.approx(math.log(B), abs=0.1)
    loss, _ = model.loss_on_trainer(data_TB, target_TB, model.init_hidden(B))
    assert loss.item() / (T * B) == pytest.approx(math.log(V), abs=0.1)


@pytest.mark.parametrize("mode", ["loss", "overlap"])
@pytest.mark.parametrize("num_streams", [1, 2, 3])
def test_modes_agree_for_every_number_of_streams(mode, num_streams):
    data_TB, target_TB = (ids[:, :num_streams].contiguous() for ids in batch())
    results = {}
    for name in ("logits", mode):
        rnn_model = new_model()
        parameters = [rref.local_value() for rref in rnn_model.parameter_rrefs()]
        with dist_autograd.context() as context_id:
            loss, hidden = model.MODES[name](rnn_model, data_TB, target_TB, rnn_model.init_hidden(num_streams))
            dist_autograd.backward(context_id, [loss])
            gradients = dist_autograd.get_gradients(context_id)
        results[name] = [loss.detach(), *(state.detach() for state in hidden), *map(gradients.get, parameters)]
    for one, other in zip(results["logits"], results[mode], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_eval_reaches_the_remote_layers():
    """Difference 9: the eval() of nn.Module has no effect in another process, because an RRef is not a submodule."""
    model = new_model(dropout=0.5)
    layers = [rref.local_value() for rref in (model.emb_table_rref, model.decoder_rref)]
    nn.Module.train(model, False)  # as the tutorial's model would do in eval()
    assert all(layer.training for layer in layers)
    model.eval()
    assert not any(layer.training for layer in layers) and not model.rnn.training
    data_TB, target_TB = batch()
    losses = [model.loss_on_trainer(data_TB, target_TB, model.init_hidden(B), step)[0].item() for step in range(3)]
    assert len(set(losses)) == 1
    model.train()
    torch.manual_seed(1)
    assert all(layer.training for layer in layers) and model.rnn.training
    losses = [model.loss_on_trainer(data_TB, target_TB, model.init_hidden(B), step)[0].item() for step in range(3)]
    assert len(set(losses)) == 3


def test_no_graph_is_built_on_a_server_in_eval_mode():
    """Difference 10: torch.no_grad() on the trainer has no effect on the server's threads."""
    model = new_model()
    table, data_TB = model.emb_table_rref.local_value(), batch()[0]
    assert table(data_TB).requires_grad
    model.eval()
    decoder = model.decoder_rref.local_value()
    assert not table(data_TB).requires_grad and not decoder(torch.zeros(T, B, H)).requires_grad


def test_switching_the_mode_sends_no_parameters():
    """Difference 9: a call of train() by RPC would send the whole module back."""
    model = new_model()
    assert isinstance(model.decoder_rref.rpc_sync().train(), remote_layers.Decoder)
    assert model.decoder_rref.rpc_sync().set_training(True) is None


def test_dropout_masks_depend_on_their_key_only():
    """Difference 11: the masks of nn.Dropout also depend on what other threads have drawn from the generator."""
    x = torch.ones(20, 5, 20, requires_grad=True)
    keyed, plain = keyed_dropout.KeyedDropout(0.4, seed=3), nn.Dropout(0.4)
    torch.manual_seed(1)
    first, plain_first = keyed(x, 7), plain(x)
    torch.manual_seed(1)
    torch.rand(1)  # as if another RPC thread had drawn a number
    assert torch.equal(keyed(x, 7), first) and not torch.equal(plain(x), plain_first)
    assert not torch.equal(keyed(x, 8), first)
    assert not torch.equal(keyed_dropout.KeyedDropout(0.4, seed=4)(x, 7), first)
    for start in range(5):  # a part of the batch gets the same part of the mask
        assert torch.equal(keyed(x[:, start : start + 2], 7, start), first[:, start : start + 2])
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert (first == 0).float().mean().item() == pytest.approx(0.4, abs=0.05)
    assert keyed(x.to("meta"), 7).shape == x.shape  # drawn on the CPU, so the other device needs no generator
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())


def test_the_lstm_is_torchs_own_layer_by_layer():
    """With the same seed it has the same parameters.  Without dropout it computes the same results and gradients."""
    keyed = keyed_dropout.KeyedLSTM(E, H, 3, dropout=0.5, seed=5).eval()
    torch.manual_seed(5)
    plain = nn.LSTM(E, H, 3)
    generator = torch.Generator().manual_seed(1)
    x_TBE = torch.randn(T, B, E, generator=generator)
    hidden = torch.randn(3, B, H, generator=generator), torch.randn(3, B, H, generator=generator)
    results = {}
    for lstm in (plain, keyed):
        output_TBH, (h_LBH, c_LBH) = lstm(x_TBE, hidden)
        (output_TBH.square().sum() + h_LBH.sum() + c_LBH.square().sum()).backward()
        parameters = list(lstm.parameters())
        results[lstm] = [output_TBH, h_LBH, c_LBH, *parameters, *(parameter.grad for parameter in parameters)]
    for one, other in zip(results[plain], results[keyed], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_dropout_is_between_the_lstms_layers_only_and_another_one_at_each():
    keyed = keyed_dropout.KeyedLSTM(E, H, 3, dropout=0.5, seed=5)
    x_TBE, hidden = torch.ones(T, B, E), (torch.zeros(3, B, H), torch.zeros(3, B, H))
    seen = []
    for drop in keyed.drops:
        drop.register_forward_hook(lambda drop, inputs, output: seen.append(output / inputs[0]))
    keyed(x_TBE, hidden, 7)
    assert len(seen) == 2 and not torch.equal(seen[0], seen[1])
    assert all(set(mask.unique().tolist()) == {0.0, 2.0} for mask in seen)


def test_a_servers_device_is_its_own(monkeypatch):
    """Difference 6: the server's own command line sets it.  The trainer does not send a device."""
    monkeypatch.setattr(owners, "device", torch.device("meta"))
    model = new_model()
    remote = [rref.local_value() for rref in model.parameter_rrefs()[:1] + model.parameter_rrefs()[-2:]]
    assert {parameter.device.type for parameter in remote} == {"meta"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def gradients_on(worker, context_id):
    return list(rpc.rpc_sync(worker, dist_autograd.get_gradients, args=(context_id,)).values())


def test_clipping_takes_the_norm_of_all_workers():
    """Difference 12: clip_grad_norm_ would see the LSTM's parameters only, and gradients of the last training step."""
    rnn_model, (data_TB, target_TB) = model_on_two_servers(), batch()
    trainer = new_trainer(clip=0.01, rnn_model=rnn_model)

    def norm(context_id, workers):
        gradients = [gradient for worker in workers for gradient in gradients_on(worker, context_id)]
        return math.sqrt(sum(gradient.square().sum() for gradient in gradients))

    with dist_autograd.context() as context_id:
        loss, _ = rnn_model.loss_on_trainer(data_TB, target_TB, rnn_model.init_hidden(B))
        dist_autograd.backward(context_id, [loss])
        before = norm(context_id, ["ps0", "trainer", "ps1"])
        assert before > 0.02 and norm(context_id, ["trainer"]) < 0.9 * before
        assert trainer.clip_gradients(context_id) == pytest.approx(before, rel=1e-5)
        assert norm(context_id, ["ps0", "trainer", "ps1"]) == pytest.approx(0.01, rel=1e-3)
        assert trainer.clip_gradients(context_id) == pytest.approx(0.01, rel=1e-3)  # small enough, so unchanged
        assert norm(context_id, ["ps0", "trainer", "ps1"]) == pytest.approx(0.01, rel=1e-3)


def gradients_of_an_asynchronous_call(after_a_synchronous_one):
    """Return how many gradients the decoder's owner has after backward(): 2 (of weight and bias), or 0."""
    rnn_model, (_, target_TB) = model_on_two_servers(), batch()
    if after_a_synchronous_one:
        rnn_model.parameter_rrefs()
    with dist_autograd.context() as context_id:
        loss = rnn_model.decoder_rref.rpc_async().loss(torch.ones(T, B, H), target_TB).wait()
        dist_autograd.backward(context_id, [2 * loss])
        return len(gradients_on("ps1", context_id))


def test_the_first_asynchronous_call_through_an_rref_is_outside_the_autograd_context():
    """Difference 7: there is no error, but the decoder's owner gets no gradient.

    In training, parameter_rrefs makes a synchronous call before, so the later calls are in the context.
    """
    # Three times, because sometimes the type arrives so early that this thread makes the call, in the context.
    assert 0 in [gradients_of_an_asynchronous_call(after_a_synchronous_one=False) for _ in range(3)]
    assert [gradients_of_an_asynchronous_call(after_a_synchronous_one=True) for _ in range(3)] == [2, 2, 2]


def test_the_step_puts_the_contexts_gradients_into_grad():
    """Difference 8: backward() does not change .grad.  DistributedOptimizer's step() replaces it by the gradients of
    the context, so the gradients of an earlier training step have no effect.
    """
    trainer, (data_TB, target_TB) = new_trainer(), batch()
    parameters = [rref.local_value() for rref in trainer.model.parameter_rrefs()]
    hidden, left = trainer.model.init_hidden(B), [None] * len(parameters)
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in parameters]
        with dist_autograd.context() as context_id:
            loss, _ = trainer.model.loss_on_trainer(data_TB, target_TB, hidden)
            dist_autograd.backward(context_id, [loss])
            assert all(parameter.grad is grad for parameter, grad in zip(parameters, left, strict=True))
            gradients = dist_autograd.get_gradients(context_id)
            trainer.opt.step(context_id)
        left = [parameter.grad for parameter in parameters]
        for parameter, old in zip(parameters, before, strict=True):
            torch.testing.assert_close(parameter.grad, gradients[parameter])
            torch.testing.assert_close(parameter, old - 0.1 * gradients[parameter])


def test_annealing_divides_the_learning_rate_by_four():
    """Difference 13: in every process, after each epoch whose held-out perplexity is not the lowest so far."""
    trainer = new_trainer(lr=8.0)
    for heldout, lr in ((9.0, 8.0), (5.0, 8.0), (5.0, 2.0), (6.0, 0.5), (4.0, 0.5)):
        trainer.anneal(heldout)
        groups = trainer.optimizer_rrefs["trainer"].local_value().optim.param_groups
        assert trainer.lr == lr and [group["lr"] for group in groups] == [lr]


def test_an_annealed_learning_rate_goes_on_after_a_resume():
    """A resume restores the learning rate in every process, and the lowest held-out perplexity so far."""
    annealed = new_trainer(lr=8.0)
    annealed.anneal(5.0)
    annealed.anneal(6.0)
    resumed = new_trainer(lr=8.0)
    resumed.load_state(annealed.state())
    groups = resumed.optimizer_rrefs["trainer"].local_value().optim.param_groups
    assert resumed.lr == 2.0 and [group["lr"] for group in groups] == [2.0]
    assert (resumed.heldout, resumed.best) == (6.0, 5.0)
    resumed.anneal(5.5)  # not the lowest so far
    assert resumed.lr == 0.5


def test_a_resumed_run_anneals_the_learning_rate_of_its_own_flag():
    """--lr is the rate at the start.  A resumed run divides its own --lr as often as the first run has divided."""
    first = new_trainer(lr=8.0)
    for heldout in (5.0, 6.0, 7.0):
        first.anneal(heldout)
    resumed = new_trainer(lr=16.0)
    resumed.load_state(first.state())
    groups = resumed.optimizer_rrefs["trainer"].local_value().optim.param_groups
    assert resumed.lr == 1.0 and [group["lr"] for group in groups] == [1.0]


def test_an_evaluation_is_without_dropout_on_every_worker():
    """This holds right after training too.  The hidden state of a batch is the start of the next batch."""
    trained = [trainer.Trainer(new_model(dropout), "loss", "sgd", 0.1, 0.0, seed=1) for dropout in (0.5, 0.0)]
    losses = []
    for each in trained:
        each.model.train()
        losses.append(each.evaluate([batch(), batch()], B))
    assert losses[0] == losses[1]
    data_TB, target_TB = batch()
    with torch.no_grad():
        model = trained[1].model
        first, hidden = model.loss_on_trainer(data_TB, target_TB, model.init_hidden(B))
        second, _ = model.loss_on_trainer(data_TB, target_TB, hidden)  # continues from the first batch
    assert losses[1] == pytest.approx((first.item() + second.item()) / (2 * T * B), rel=1e-6)


def test_a_generated_text_goes_on_from_its_own_past_and_without_dropout():
    """Each token is drawn from the scores that a model without dropout computes from all tokens before it."""
    writer = trainer.Trainer(new_model(dropout=0.9), "logits", "sgd", 0.1, clip=0.0, seed=1)
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


def test_the_mean_loss_is_per_token_and_not_per_batch():
    assert progress.mean_loss([(2.0, 1), (8.0, 8)]) == 10 / 9


def test_layers_start_from_seeds_of_their_own():
    """Difference 14: two constructors may run at the same time on one server, which has one default generator."""
    states = [new_model().state() for _ in range(2)]
    for part in ("table", "decoder", "rnn"):
        for name, value in states[0][part].items():
            assert torch.equal(value, states[1][part][name])
