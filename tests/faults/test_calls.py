"""The kernel refuses system calls, as a container's seccomp filter may: with a helper or without, training goes on."""

from __future__ import annotations

import errno

import pytest
from faults.training import Same
from seccomp import REFUSE, X86_64

pytestmark = [pytest.mark.torch, X86_64]
UNWATCHED = {
    "memfd_create": (319,),
    "prlimit64": (302,),
    "fallocate": (285,),
    "fcntl": (72,),
    "clone": (56, 58, 435),
    "execve": (59, 322),
    "dup2": (33, 292),
    "setsid": (112,),
}
"""Without these there is no helper."""
WATCHED = {
    "pidfd_open": (434,),
    "sched_setaffinity": (203,),
    "setpriority": (141,),
    "close_range": (436,),
    "getrandom": (318,),
}


@pytest.mark.parametrize("name", UNWATCHED)
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM], ids=["ENOSYS", "EPERM"])
def test_no_helper_can_be(same: Same, name: str, error: int) -> None:
    ran = same(f"{REFUSE}\nrefuse(*{UNWATCHED[name]}, errno={error})\nwatch(awaited=False)\ntrain(5)", lines=1)
    assert ran.own, "it says that nobody can attach"
    assert "no viewer can attach" in ran.own[0]


@pytest.mark.parametrize("name", WATCHED)
def test_it_is_watched_all_the_same(same: Same, name: str) -> None:
    ran = same(
        f"{REFUSE}\nrefuse(*{WATCHED[name]}, errno={errno.EPERM})\nwatch()\ntrain(5)\nassert not WATCHED or helper()"
    )
    assert ran.own == []


@pytest.mark.parametrize("name", ["kill", "pipe", "socket", "bind", "epoll_create1", "eventfd2", "unlink"])
def test_what_only_the_helper_needs(same: Same, name: str) -> None:
    """It inherits the filter. The training neither sees nor hears of its end."""
    numbers = {
        "kill": (62,), "pipe": (22, 293), "socket": (41,), "bind": (49,), "epoll_create1": (291, 213),
        "eventfd2": (290, 284), "unlink": (87, 263),
    }  # fmt: skip
    same(
        f"{REFUSE}\nrefuse(*{numbers[name]}, errno=1)\nwatch(awaited=False)\ntrain(5)\ntime.sleep(1)\ntrain(5)",
        lines=1,
    )
