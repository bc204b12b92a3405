"""For test_tutorial.py: the server of tutorial.py calls these functions, which check what it computes."""

import torch
import torch.nn.functional as F

versions = []  # of the weights, before the first step and after each
forwards = []  # (the clones of the weights, the images) of each forward pass


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def note_forward(weights, images):
    """Note with which weights a forward pass is computed. Several RPC threads call this at the same time."""
    forwards.append((flat(weights.values()), images.clone()))


def note_step(optimizer, step):
    """Make a step, and note the weights. The caller holds their lock."""
    params = optimizer.param_groups[0]["params"]
    if not versions:
        versions.append(flat(params))
    step()
    versions.append(flat(params))


def check(net, digits):
    """Compute the gradient of each forward pass again. All steps together must have applied the sum of them."""
    label_of = {image.numpy().tobytes(): label for image, label in digits}
    total, seen, used = torch.zeros_like(versions[0]), set(), set()
    for weights, images in forwards:
        same = [number for number, version in enumerate(versions) if torch.equal(version, weights)]
        assert same, "a torn snapshot: weights of two versions"
        used.add(same[0])
        names = [image.numpy().tobytes() for image in images]
        seen.update(names)
        torch.nn.utils.vector_to_parameters(weights, net.parameters())
        loss = F.nll_loss(net(images), torch.stack([label_of[name] for name in names]))
        total += flat(torch.autograd.grad(loss, list(net.parameters())))
    difference = (versions[0] - 0.03 * total - versions[-1]).abs().max()
    steps = f"{len(versions) - 1} steps, from {len(used)} versions of the weights and {len(seen)} images"
    print(f"checked {steps}, difference {difference:.1e}", flush=True)
