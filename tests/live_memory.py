"""Memory of the tensors that operators make, counted while they exist."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Context that counts the bytes of tensors made in it; memory inside of operators is not seen.

    Attributes:
        bytes: of those that exist.
        peak: largest number of bytes so far.
    """

    def __init__(self):
        super().__init__()
        self.bytes = self.peak = 0
        self._alive = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        given = {_key(each) for each in tree_leaves((arguments, options)) if isinstance(each, torch.Tensor)}
        results = function(*arguments, **(options or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor) and _key(result) not in given | self._alive.keys():
                self._count(result.untyped_storage())
        return results

    def _count(self, storage):
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        self._alive[storage._cdata] = weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key, size):
        self.bytes -= size
        del self._alive[key]


def _key(tensor):
    return tensor.untyped_storage()._cdata
