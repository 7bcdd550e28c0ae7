"""Classes of modules that mind being subclassed: sharding makes a subclass, and nobody's code hears of it."""

import abc
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import fully_shard
from tests.harness import assert_same, compiled, distributed, train

KNOWN: list[str] = []


class Keyed(nn.Linear):
    def __init_subclass__(cls, *, kind: str, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.kind = kind


class WithKeyword(Keyed, kind="dense"):
    pass


class Registering(nn.Linear):
    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if cls.__name__ in KNOWN:
            raise ValueError(f"there is a layer of the name {cls.__name__}")
        KNOWN.append(cls.__name__)


class Registered(Registering):
    pass


class Final(nn.Linear):
    def __init_subclass__(cls, **more: Any) -> None:
        raise TypeError("not to be subclassed")


class KeywordMeta(type):
    def __new__(mcs, name: str, bases: tuple, namespace: dict, *, kind: str) -> type:
        return super().__new__(mcs, name, bases, namespace)

    def __init__(cls, name: str, bases: tuple, namespace: dict, *, kind: str) -> None:
        super().__init__(name, bases, namespace)


class OfKeywordMeta(nn.Linear, metaclass=KeywordMeta, kind="dense"):
    pass


class RegisteringMeta(abc.ABCMeta):
    def __init__(cls, name: str, bases: tuple, namespace: dict) -> None:
        super().__init__(name, bases, namespace)
        KNOWN.append(name)


class OfRegisteringMeta(nn.Linear, metaclass=RegisteringMeta):
    pass


class FinalMeta(type):
    def __new__(mcs, name: str, bases: tuple, namespace: dict) -> type:
        if any(isinstance(base, FinalMeta) for base in bases):
            raise TypeError("not to be subclassed")
        return super().__new__(mcs, name, bases, namespace)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        KNOWN.append(f"a {cls.__name__}")
        return super().__call__(*args, **kwargs)


class OfFinalMeta(nn.Linear, metaclass=FinalMeta):
    pass


T = TypeVar("T")


class Parametric(nn.Linear, Generic[T]):
    pass


class Slotted(nn.Linear):
    __slots__ = ("extra",)


class Strict(nn.Linear):
    """Once it is made, it takes no other attributes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.__dict__["is_made"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("is_made") and name not in self.__dict__["_parameters"]:
            raise AttributeError(f"no attribute {name}")
        super().__setattr__(name, value)


CLASSES = [WithKeyword, Registered, Final, OfKeywordMeta, OfRegisteringMeta, OfFinalMeta, Parametric, Slotted]


def layers(*more: type) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(layer(4, 4) for layer in (*CLASSES, *more)))


def step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(torch.arange(8.0).reshape(2, 4) / (index + 1)).square().mean()
    loss.backward()
    return loss.detach()


@distributed(world_size=2)
@pytest.mark.parametrize("units", ["root", "each"])
def test_training(rank, world_size, units):
    """Inside of a unit, where FSDP2 makes no subclass, and as units, where FSDP2 raises what their classes raise."""
    # FSDP2 sets attributes, which a Strict layer refuses
    expected = train(torch_fully_shard(layers(nn.Linear)), step, steps=2)
    for way in ("eager", "compiled_fsdp") if units == "root" else ("eager",):
        model = layers(Strict)
        known = list(KNOWN)
        for layer in model if units == "each" else ():
            fully_shard(layer)
        fully_shard(model)
        assert_same(train(compiled(model) if way == "compiled_fsdp" else model, step, steps=2), expected)
        assert known == KNOWN


@distributed(world_size=1)
def test_the_subclass(rank, world_size):
    class Abstract(nn.Linear, abc.ABC):
        pass

    class Other(Abstract):
        pass

    for cls in (*CLASSES, Strict, Abstract):
        layer, another = (fully_shard(nn.Sequential(cls(4, 4)))[0] for _ in range(2))
        assert type(layer) is type(another) is not cls
        assert type(layer).__name__ == cls.__name__
        assert type(type(layer)) is type(cls)
        assert isinstance(layer, cls)
    # an abstract class remembers what isinstance() has said, and a subclass remembers for itself
    assert not isinstance(Other(4, 4), type(layer))
    assert isinstance(Other(4, 4), Abstract)
    assert fully_shard(nn.Sequential(WithKeyword(4, 4)))[0].kind == "dense"
    # what others make of it later is theirs to say
    with pytest.raises(TypeError, match="not to be subclassed"):
        type("Final", (type(fully_shard(nn.Sequential(Final(4, 4)))[0]),), {})
