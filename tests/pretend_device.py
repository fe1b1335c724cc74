"""Pretends that tensors are on cuda:0, and refuses the CPU's as CUDA would.

Their numbers are held on the CPU and every op runs there, so results are the CPU's, and no GPU is
needed to find a tensor made without a device, a CPU generator used for a draw on the device, a
tensor not copied before `numpy()`, or a wait for the device in a loop. Inside `PretendDevice()`
what is made with device="cuda" is such a tensor. Autograd works: all this is below it.

Not shown: kernels that CUDA lacks (but integer products are refused), rounding, memory, fused
attention and compiled functions, autocast, streams, and threads other than the caller's.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DEVICE", "PretendDevice", "PretendTensor"]

aten = torch.ops.aten
DEVICE, META = torch.device("cuda:0"), torch.device("meta")

MIXED = "Expected all tensors to be on the same device, but found at least two devices, "
COPIES = {aten._to_copy, aten.copy_, aten.copy}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.dot, aten.addmv}
"""On CUDA: not for integers."""
WAITING = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2,
    aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave, aten.bincount,
    aten._linalg_check_errors, aten._linalg_eigh, aten.linalg_lstsq,
}  # fmt: skip
"""The size of their result, or the result itself, must be known on the host."""
TAKES_A_NUMBER = {aten.where, aten.masked_fill, aten.masked_fill_, aten.fill, aten.fill_}
"""Besides what is pointwise: an operand of no dimension may be on the CPU."""
FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray}


class PretendTensor(Tensor):
    """Holds its numbers on the CPU, in `held`, and claims to be on cuda:0.

    To torch's C++ it is on the meta device: a CPU-only build has no autograd for CUDA.
    """

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "PretendTensor":
        shape = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, **shape, dtype=held.dtype, device="meta"
        )
        made.held = held
        return made

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda, is_cpu, is_meta = True, False, False

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        raise RuntimeError("the address of memory on a GPU means nothing to code for the CPU")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied.__dict__.update({k: v for k, v in self.__dict__.items() if k != "held"})
        return memo.setdefault(id(self), copied)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a pretend tensor outside of its PretendDevice")


class PretendDevice(TorchDispatchMode):
    """Provides a device cuda:0 within its context.

    `waits` counts, by the line of the library, what made the host wait for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._named, self._contexts = _Named(), ExitStack()

    def __enter__(self) -> Self:
        self._contexts.enter_context(patch.object(torch.cuda, "_lazy_init", lambda: None))
        # In inference mode composite ops would come whole, and views of other tensors would fail.
        no_grad = patch.object(
            torch._C, "_InferenceMode", lambda on: torch.set_grad_enabled(not on)
        )
        self._contexts.enter_context(no_grad)
        # Else a module that is moved gets new parameters, and those that share one no longer do.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        self._contexts.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)
        self._contexts.enter_context(self._named)
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._contexts.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = list(_tensors((args, kwargs.values())))
        pretend = any(map(_pretend, given))
        target = kwargs.get("device")
        # torch's C++ takes a pretend tensor to be on meta, and makes more there
        ours = ("cuda",) if self._named.meta else ("cuda", "meta")
        on_device = pretend if target is None else target.type in ours
        if not (pretend or on_device):
            return func(*args, **kwargs)
        operation = func.overloadpacket
        if operation not in COPIES:
            _refuse_mixtures(func, args, kwargs, given)
        if on_device and kwargs.get("generator") is not None:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if operation in PRODUCTS and not given[0].dtype.is_floating_point:
            raise RuntimeError(f'"{operation.__name__}_cuda" not implemented for integers')
        self._count(operation, args, given, on_device)
        held = {name: _held(value) for name, value in kwargs.items()}
        if target is not None and on_device:
            held["device"] = torch.device("cpu")
        result = func(*_held(args), **held)
        written = [_argument(args, kwargs, place) for place in _written(func)]
        if written and func._schema.returns:
            return written[0] if len(written) == 1 else tuple(written)
        return _as_pretend(result) if on_device else result

    def _count(self, operation: Any, args: Any, given: list[Tensor], on_device: bool) -> None:
        waits = int(operation in WAITING)
        if operation in COPIES:
            to_device = on_device if operation is aten._to_copy else _pretend(given[0])
            waits = int(_pretend(given[-1]) and not to_device)
        elif operation in INDEXING:
            indices = [x for x in args[1] if x is not None]
            # Where one mask is True, CUDA fills in a number without asking how often.
            if operation is aten.index or args[2].numel() > 1 or len(indices) > 1:
                waits = sum(x.dtype == torch.bool for x in indices)
        if waits:
            self.waits[_place()] += waits


class _Named(TorchFunctionMode):
    """Reads "cuda" as cuda:0; torch.tensor(..., device=) copies a CPU tensor."""

    meta = False
    """Whether the call in hand names the device meta."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args = tuple(map(_with_index, args))
        kwargs = {name: _with_index(value) for name, value in (kwargs or {}).items()}
        device = kwargs.get("device")
        if func is Tensor.new_tensor and _pretend(args[0]):
            like = {"dtype": args[0].dtype, "device": DEVICE}
            return self.__torch_function__(torch.tensor, types, args[1:], like | kwargs)
        if func in FROM_DATA and device == DEVICE:
            del kwargs["device"]
            return func(*args, **kwargs).to(DEVICE)
        if func is Tensor.to and args[1:] == (DEVICE,) and not kwargs and _pretend(args[0]):
            return args[0]  # torch's C++ would copy it, as it takes it to be on meta
        if func is Tensor.cuda:
            return args[0].to(DEVICE)
        if device is not META and META not in args[1:2]:
            return func(*args, **kwargs)
        with patch.object(self, "meta", True):
            return func(*args, **kwargs)


def _with_index(x: Any) -> Any:
    if not (isinstance(x, str | torch.device) and str(x) in ("cuda", "cuda:0", "meta")):
        return x
    return META if str(x) == "meta" else DEVICE


def _pretend(x: Tensor) -> bool:
    return isinstance(x, PretendTensor)


def _tensors(given: Any) -> Iterator[Tensor]:
    for x in given:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple) or type(x).__name__ == "dict_values":
            yield from _tensors(x)


def _held(x: Any) -> Any:
    if isinstance(x, PretendTensor):
        return x.held
    return type(x)(map(_held, x)) if type(x) in (list, tuple) else x


def _as_pretend(x: Any) -> Any:
    if isinstance(x, Tensor):
        return PretendTensor(x)
    return type(x)(map(_as_pretend, x)) if isinstance(x, list | tuple) else x


@cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Finds place and name of the arguments that an op writes to and returns."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]


def _argument(args: Any, kwargs: Any, place: tuple[int, str]) -> Any:
    number, name = place
    return args[number] if number < len(args) else kwargs.get(name)


def _refuse_mixtures(func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> None:
    """Raises RuntimeError where tensors on the CPU meet some on the device, as CUDA does."""
    operation = func.overloadpacket
    if operation in INDEXING:
        indices = [x for x in args[1] if x is not None]
        if not _pretend(args[0]) and any(_pretend(x) for x in indices):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        given = [args[0], *(x for x in args[2:3] if isinstance(x, Tensor) and x.dim())]
    elif torch.Tag.pointwise in func.tags or operation in TAKES_A_NUMBER:
        written = [_argument(args, kwargs, place) for place in _written(func)]
        given = [x for x in given if x.dim() or any(x is y for y in written) or _pretend(x)]
    if len({_pretend(x) for x in given}) == 2:
        raise RuntimeError(f"{MIXED}cuda:0 and cpu! ({func})")


def _place() -> str:
    """Returns file:line of the library, or of the caller, that the op comes from."""
    frame, caller = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_filename
        if "value_aware_attention" in name:
            return f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        if caller is None and "/torch/" not in name and name != __file__:
            caller = f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return caller or "torch"
