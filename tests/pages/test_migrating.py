"""docs/MIGRATING.md: what can be seen without Ray and Monarch. No test runs the programs in docs/migrating."""

import copy

import pytest
import torch
import torch.nn.functional as F

import local_rpc
from helpers import ROOT, assert_in_order
from pages import Page

pytestmark = pytest.mark.quick
TUTORIAL_LOOP, RAY_LOOP, SPLIT = Page("docs/MIGRATING.md").blocks("python")


@pytest.mark.parametrize(
    "excerpt, path",
    [(TUTORIAL_LOOP, ROOT / "param_server/tutorial.py"), (RAY_LOOP, ROOT / "docs/migrating/ray_parameter_server.py")],
)
def test_an_excerpt_has_the_programs_lines_in_their_order(excerpt, path):
    assert_in_order(excerpt.splitlines(), path)


def test_backward_in_two_calls_trains_like_one_backward():
    page = {"torch": torch, "F": F, "call": lambda method, *arguments: local_rpc.rpc_sync(None, method, arguments)}
    exec(SPLIT, page)
    whole = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LogSoftmax(dim=1))
    server = page["Server"](copy.deepcopy(whole), lr=0.1)
    before = server.model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for number in range(3):
        images, target = torch.randn(5, 6), torch.randint(0, 4, (5,))
        page["train_step"](server, number, images, target)
        F.nll_loss(whole(images), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.allclose(server.model[0].weight, before)
    torch.testing.assert_close(server.model.state_dict(), whole.state_dict())
    assert server.kept == {}
