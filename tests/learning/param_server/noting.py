"""For test_tutorial.py: the server of tutorial.py calls these functions. They check each gradient."""

import torch
import torch.nn.functional as F

versions = []  # of the weights, before the first step and after each
forwards = []  # (the clones of the weights, the images) of each forward pass
gradients = []  # of each step


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def note_forward(weights, images):
    """Note with which weights a forward pass is computed. Several RPC threads call this at the same time."""
    forwards.append((flat(weights.values()).clone(), images.clone()))


def note_step(optimizer, step):
    """Make a step, and note it. The caller holds the lock of the weights."""
    params = optimizer.param_groups[0]["params"]
    before, gradient = flat(params).clone(), flat(param.grad for param in params).clone()
    if not versions:
        versions.append(before)
    assert torch.equal(before, versions[-1]), "weights have changed between two steps"
    step()
    versions.append(flat(params).clone())
    assert torch.equal(versions[-1], before.add(gradient, alpha=-0.03)), "a step of another gradient"
    gradients.append(gradient)


def check(net, digits):
    """Compute the gradient of each forward pass again, and find it among the steps."""
    label_of = {image.numpy().tobytes(): label for image, label in digits}
    late, worst, seen, missing = 0, 0.0, set(), dict(enumerate(gradients))
    for weights, images in forwards:
        same = [version for version, their in enumerate(versions) if torch.equal(their, weights)]
        assert same, "a torn snapshot: weights of two versions"
        names = [image.numpy().tobytes() for image in images]
        seen.update(names)
        torch.nn.utils.vector_to_parameters(weights, net.parameters())
        loss = F.nll_loss(net(images), torch.stack([label_of[name] for name in names]))
        expected = flat(torch.autograd.grad(loss, list(net.parameters())))
        differences = {number: (one - expected).abs().max().item() for number, one in missing.items()}
        number = min(differences, key=differences.get)
        worst = max(worst, differences[number])
        late += same[0] < number
        del missing[number]
    assert not missing, "steps without a forward pass"
    checked = f"checked {len(gradients)} gradients of {len(seen)} images"
    print(f"{checked}, {late} late, worst difference {worst:.1e}", flush=True)
