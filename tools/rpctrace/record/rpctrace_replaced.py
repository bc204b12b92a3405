"""The functions of torch that are replaced, so that every call is seen."""

import functools
import importlib.machinery
import sys

RPC, OPTIM, PROFILER = "torch.distributed.rpc", "torch.distributed.optim", "torch.autograd.profiler"
# What is replaced when a module has been imported. Most of these functions have private names, because torch has no
# public way to see every call. Each row has the module and the name; the method of the recorder that takes its place,
# or None if it is only used; and the parameters that it must have, or None for one of C++, which has no signature.
REPLACED = {
    RPC: [
        # A call that is made first enters torch's profiler, which has its kind and the worker that is called. Then its
        # function and arguments are packed, and the message is sent.
        (RPC, "api._enable_rpc_profiler", "note_call", "should_profile qualified_name func rpc_type dst_worker_info"),
        (RPC, "internal._InternalRPCPickler.serialize", "pack", "self obj"),
        (RPC, "api._invoke_rpc_python_udf", "send", None),
        (RPC, "api._invoke_remote_python_udf", "send", None),
        (RPC, "PyRRef._get_future", None, None),
        # The callee unpacks the message, and runs the function.
        (RPC, "internal.PythonUDF.__new__", None, "_cls func args kwargs"),
        (RPC, "internal._InternalRPCPickler.deserialize", "unpack", "self binary_data tensor_table"),
        (RPC, "internal._run_function", "serve", "python_udf"),
        (RPC, "PyRRef.to_here", "fetch", None),
        (RPC, "init_rpc", "join", "name backend rank world_size rpc_backend_options"),
        (RPC, "shutdown", "leave", "graceful timeout"),
        ("torch._C", "Future.wait", "wait", None),
        ("torch.distributed.autograd", "backward", "backward", None),
    ],
    PROFILER: [
        (PROFILER, "record_function.__enter__", "enter_block", "self"),
        (PROFILER, "record_function.__exit__", "leave_block", None),
    ],
    OPTIM: [(OPTIM, "DistributedOptimizer.step", "step", "self context_id")],
}


class Finder:
    """Finds the modules of REPLACED. When one is executed, its functions are replaced."""

    def __init__(self, recorder):
        self.recorder = recorder

    def find_spec(self, name, path=None, target=None):
        """Let replace() execute the module. Python asks this at each import."""
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in REPLACED else None
        if spec:
            spec.loader.exec_module = functools.partial(self.replace, spec.loader.exec_module)
        return spec

    def replace(self, execute, module):
        """Execute a module, and put ours around all functions of REPLACED for it, or around none."""
        execute(module)
        import inspect  # torch has imported it

        recorder = self.recorder
        recorder.torch, recorder.rpc = sys.modules["torch"], sys.modules.get(RPC)
        found = []
        try:
            for where, path, ours, parameters in REPLACED[module.__name__]:
                *outer, name = path.split(".")
                owner = functools.reduce(lambda one, name: getattr(one, name, None), outer, sys.modules.get(where))
                plain = getattr(owner, name, None)
                if not plain:
                    raise LookupError(f"there is no {where}.{path}")
                if parameters and list(inspect.signature(plain).parameters) != parameters.split():
                    raise LookupError(f"{where}.{path} has other parameters")
                if ours:
                    found.append((owner, name, put_around(plain, getattr(recorder, ours))))
            for replacement in found:
                setattr(*replacement)
            if module is recorder.rpc:
                recorder.write("{}")  # so it is known that this process is there
        except Exception as error:  # whatever it is, the program runs on
            recorder.not_recorded(f"torch {recorder.torch.__version__}: {error}")


def put_around(plain, ours):
    """Return a function that calls `ours` with the plain function and its arguments."""

    @functools.wraps(plain)
    def function(*args, **kwargs):
        return ours(plain, *args, **kwargs)

    return function
