"""A pretend accelerator: shows on a machine without a GPU that every tensor is where it belongs.

Importing this file adds the device "pretend:0" to this process.  A tensor there computes on the CPU, hence the same
numbers, but is as strict as one on a GPU: it refuses to meet a CPU tensor in one operator, and to hand out its numpy
array.  It also refuses to be pickled, as all that crosses RPC is, and all that enters a checkpoint; and to take part in
a collective of a process group, for ours are on the CPU.

Import it before the process's first backward(): autograd counts the devices then, and starts a thread for each.  (A
test file's imports are early enough, for pytest imports them all before it runs a test.)  Without a part of torch that
is still experimental, MISSING says so, and there is no such device.

What it cannot carry: sparse tensors, a second device (autograd would know of one only), streams, a torch.Generator of
its own (it draws from the CPU's), and torch.tensor(..., device=...), for which there is tensor_by_copy.
"""

import torch
from torch.utils import _pytree as pytree

try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as set_up_backend

    MISSING = None
except ImportError:
    MISSING = f"torch {torch.__version__} cannot add a device that is written in Python"

DEVICE = "pretend:0"
COPIES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize"}  # may go between devices


class PretendTensor(torch.Tensor):
    """A tensor that says it is on DEVICE; `elem` is the CPU tensor that it computes with."""

    @staticmethod
    def __new__(cls, elem):
        layout = {"strides": elem.stride(), "storage_offset": elem.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, elem.size(), dtype=elem.dtype, device=DEVICE, **layout)

    def __init__(self, elem):
        self.elem = elem

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):  # flat_weights.py makes parameters views of one tensor with it: same shape, same type
        self.elem = other.elem

    def __repr__(self):
        return f"pretend({self.elem})"

    def __format__(self, spec):
        return format(self.elem, spec)

    def tolist(self):
        return self.elem.tolist()

    def numpy(self):
        raise TypeError("a tensor of the pretend device was asked for its numpy array")

    def __reduce_ex__(self, protocol):
        raise TypeError("a tensor of the pretend device was pickled: it must travel by way of the CPU")

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return run(operator, *args, **(kwargs or {}))


def run(operator, *args, **kwargs):
    """Run an ATen operator that has a tensor of DEVICE among its arguments, or is to make one there."""
    name, leaves = operator._schema.name, pytree.tree_leaves((args, kwargs))
    ours = [leaf for leaf in leaves if isinstance(leaf, PretendTensor)]
    others = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, PretendTensor)]
    if ours and name not in COPIES and any(tensor.dim() for tensor in others):  # a single number may, as on a GPU
        raise RuntimeError(f"{name}: tensors of the pretend device and of the CPU were mixed")
    if name.startswith("c10d::") and any(
        tensor.is_floating_point() for tensor in ours
    ):  # DDP sends integers of its own
        raise TypeError(f"{name}: a tensor of the pretend device was given to a collective")

    if name == "aten::copy_":  # its first argument says where the result is
        result_is_ours = isinstance(args[0], PretendTensor)
    elif kwargs.get("device") is not None:
        result_is_ours = torch.device(kwargs["device"]) == torch.device(DEVICE)
    else:
        result_is_ours = bool(ours)

    args, kwargs = pytree.tree_map(to_cpu, (args, kwargs))
    result = BY_HAND.get(name, operator)(*args, **kwargs)
    # What works in place returns an argument: hand back the caller's own, not another tensor of the same memory.
    same = {id(tensor.elem): tensor for tensor in ours} | {id(tensor): tensor for tensor in others}
    wrap = PretendTensor if result_is_ours else lambda tensor: tensor
    return pytree.tree_map_only(torch.Tensor, lambda t: same[id(t)] if id(t) in same else wrap(t), result)


def to_cpu(leaf):
    """Return what an operator's argument is on the CPU."""
    if isinstance(leaf, PretendTensor):
        return leaf.elem
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf == torch.device(DEVICE) else leaf


def lstm_cell(from_input, from_hidden, cell, input_bias=None, hidden_bias=None):
    """What torch computes in one operator where there is no CPU: (hidden, cell, the gates for the backward pass)."""
    gates = from_input + from_hidden if input_bias is None else from_input + from_hidden + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cell = f * cell + i * g
    return o * cell.tanh(), cell, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(grad_hidden, grad_cell, cell_before, cell, gates, has_bias):
    """Return the gradients of the gates, of cell_before, and of the bias."""
    i, f, g, o = gates.chunk(4, 1)
    tanh = cell.tanh()
    grad_hidden = torch.zeros_like(cell) if grad_hidden is None else grad_hidden
    grad = grad_hidden * o * (1 - tanh * tanh) + (0 if grad_cell is None else grad_cell)
    grads = (grad * g * i * (1 - i), grad * cell_before * f * (1 - f), grad * i * (1 - g * g))
    grad_gates = torch.cat([*grads, grad_hidden * tanh * o * (1 - o)], 1)
    return grad_gates, grad * f, grad_gates.sum(0) if has_bias else None


BY_HAND = {
    "aten::_thnn_fused_lstm_cell": lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
}


def tensor_by_copy(data, *, device=None, make=torch.tensor, **keywords):
    """What a test puts in the place of torch.tensor, which goes around the operators: make it on the CPU, and copy."""
    return make(data, **keywords).to(device)


class DeviceModule:
    """What torch asks of `torch.<device>`, like torch.cuda."""

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    manual_seed_all = staticmethod(lambda seed: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float32])


if MISSING is None:
    set_up_backend("pretend", backend_module=DeviceModule())
    library = torch.library.Library("_", "IMPL")  # for as long as this name refers to it
    library.fallback(run, dispatch_key="PrivateUse1")
