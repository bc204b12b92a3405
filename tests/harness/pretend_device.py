"""A pretend accelerator, with which a machine without a GPU can test that every tensor is on the right device.

Importing this file adds the devices "pretend:0" and "pretend:1" to this process. Tensors on them compute on the CPU, so
the numbers are the same. But like tensors on a GPU, they raise an error if they are used in one operator together with
a tensor of another device, or if their numpy array is requested. They also raise an error if they are pickled, which
happens to everything that is sent by RPC, or if they are given to a collective that Gloo lacks on a GPU. torch.save
writes them as CPU tensors.

Import it before the first backward() of the process, because autograd then counts the devices and starts a thread for
each. (Imports of a test file are early enough, because pytest imports all test files before it runs a test.)  It needs
an experimental part of torch. If torch does not have it, MISSING says so, and the device does not exist.

Autograd has a thread for each device of a machine, and finds only one of these two. So backward() through pretend:1
works only within one_thread(), and not in the RPC threads of a distributed backward pass.

It does not support sparse tensors, streams, a torch.Generator of its own (it uses the CPU's), and
torch.tensor(..., device=...), for which tensor_by_copy can be used.
"""

import torch
from torch.utils import _pytree as pytree

try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as set_up_backend

    MISSING = None
except ImportError:
    MISSING = f"torch {torch.__version__} cannot add a device that is written in Python"

DEVICE, SECOND = "pretend:0", "pretend:1"
# Operators that copy between devices.
COPIES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize"}


# Gloo has these for tensors on a GPU too, and DDP uses them.
COLLECTIVES = {"c10d::broadcast_", "c10d::allreduce_", "c10d::allgather_"}


class PretendTensor(torch.Tensor):
    """A tensor on one of the two devices. `elem` is the CPU tensor with which it computes."""

    @staticmethod
    def __new__(cls, elem, device):
        layout = {"strides": elem.stride(), "storage_offset": elem.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, elem.size(), dtype=elem.dtype, device=device, **layout)

    def __init__(self, elem, device):
        self.elem = elem

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):  # vector_to_parameters sets it, to a tensor of the same shape and type
        assert other.device == self.device, (
            "Module.to() cannot move parameters from one of the two devices to the other"
        )
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
    """Run an ATen operator that has a tensor on one of the devices among its arguments, or that creates one there."""
    name, leaves = operator._schema.name, pytree.tree_leaves((args, kwargs))
    ours = [leaf for leaf in leaves if isinstance(leaf, PretendTensor)]
    others = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, PretendTensor)]
    places = {tensor.device for tensor in ours} | {tensor.device for tensor in others if tensor.dim()}
    if ours and name not in COPIES and len(places) > 1:  # numbers on the CPU are allowed, as on a GPU
        raise RuntimeError(f"{name}: tensors of {' and '.join(map(str, places))} were mixed")
    if ours and name.startswith("c10d::") and name not in COLLECTIVES:
        raise TypeError(f"{name}: a tensor of the pretend device was given to a collective")

    if name == "aten::copy_":  # the result is on the device of the first argument
        device = args[0].device
    elif kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
    else:
        device = ours[0].device if ours else torch.device("cpu")

    args, kwargs = pytree.tree_map(to_cpu, (args, kwargs))
    result = BY_HAND.get(name, operator)(*args, **kwargs)
    # An in-place operator returns one of its arguments. Return the caller's tensor object, not a new one.
    same = {id(tensor.elem): tensor for tensor in ours} | {id(tensor): tensor for tensor in others}

    def found(tensor):
        if id(tensor) in same or device.type != "pretend":
            return same.get(id(tensor), tensor)
        return PretendTensor(tensor, device)

    return pytree.tree_map_only(torch.Tensor, found, result)


def to_cpu(leaf):
    """Return an operator's argument with these devices replaced by the CPU."""
    if isinstance(leaf, PretendTensor):
        return leaf.elem
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "pretend" else leaf


def one_thread():
    """Return a context in which autograd runs backward() in the thread that calls it."""
    return torch.autograd.set_multithreading_enabled(False)


def lstm_cell(from_input, from_hidden, cell, input_bias=None, hidden_bias=None):
    """Return (hidden, cell, gates for the backward pass): one operator in torch, which has no version for the CPU."""
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
    """Create the tensor on the CPU and copy it. Tests use this instead of torch.tensor, which calls no operator."""
    return make(data, **keywords).to(device)


def save(content, *where, save=torch.save, **how):
    """Write what torch.load(..., map_location="cpu") would read, if the tensors were on a GPU."""
    save(pytree.tree_map_only(PretendTensor, lambda tensor: tensor.elem, content), *where, **how)


torch.save = save


class DeviceModule:
    """The functions that torch expects in the module `torch.<device>`, such as torch.cuda."""

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    manual_seed_all = staticmethod(lambda seed: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float32])


if MISSING is None:
    set_up_backend("pretend", backend_module=DeviceModule())
    library = torch.library.Library("_", "IMPL")  # it is active as long as this object exists
    library.fallback(run, dispatch_key="PrivateUse1")
