"""`Turns`: whoever uses them, in whatever order, acts in the order in which they were drawn."""

import signal
import threading

import pytest
from interrupt_cases import Interrupt, from_a_signal

from tpu_embed.processes.turns import Turns

LONG = 60
"""Seconds after which a thread that waits has a deadlock."""


def test_turns_are_used_in_the_order_in_which_they_were_drawn():
    turns, used = Turns(), []
    numbers = [turns.draw() for _ in range(20)]

    def use(number):
        with turns.use(number):
            used.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in reversed(numbers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert used == numbers


def test_turns_that_are_released_early_are_not_waited_for():
    turns = Turns()
    first, second, third, fourth = (turns.draw() for _ in range(4))
    turns.release(third)
    turns.release(second)
    with turns.use(first):
        pass
    with turns.use(fourth):
        pass


def test_an_error_ends_a_turn():
    turns = Turns()
    first, second = turns.draw(), turns.draw()
    with pytest.raises(OSError, match="mine"), turns.use(first):
        raise OSError("mine")
    with turns.use(second):
        pass


def test_after_an_interrupted_wait_the_processes_are_out_of_step(monkeypatch):
    """The others place the batch that this one has left out: no later turn may go on silently."""
    turns = Turns()
    first, second, third = (turns.draw() for _ in range(3))

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(turns._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), turns.use(second):
            pass
    text = r"place: expected calls .*; the processes are out of step"
    with pytest.raises(RuntimeError, match=text), turns.use(first):
        pass
    with pytest.raises(RuntimeError, match="out of step"), turns.use(third):
        pass


def test_a_thread_that_holds_a_turn_cannot_wait_for_a_later_one():
    turns = Turns()
    first, second, third = turns.draw(), turns.draw(), turns.draw()
    with turns.hold(first):
        with pytest.raises(RuntimeError, match=r"wait for itself.*in the loop"), turns.use(second):
            pass
        with turns.use(first):
            pass
        with turns.use(third):  # the first has ended, and so has the refused one
            pass


def test_another_thread_may_hold_an_earlier_turn():
    turns, held, used = Turns(), threading.Event(), []
    first, second = turns.draw(), turns.draw()

    def use_the_first():
        with turns.hold(first):
            held.set()
            with turns.use(first):
                used.append(first)

    thread = threading.Thread(target=use_the_first)
    thread.start()
    held.wait(LONG)
    with turns.use(second):
        used.append(second)
    thread.join(LONG)
    assert used == [first, second]


def test_a_function_that_runs_in_the_next_turn_waits_for_those_before_it():
    turns, done = Turns(), []
    first = turns.draw()
    later = threading.Thread(target=lambda: done.append(turns.run_next(lambda: [*done])))
    later.start()
    with turns.use(first):
        done.append("first")
    later.join(LONG)
    assert done == ["first", ["first"]]


@pytest.mark.parametrize("where", ["draw", "_wait", "run", "release"])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_leaves_no_turn_behind_that_later_ones_wait_for(where, after, monkeypatch):
    """It comes before or after a part of the work; after a draw, the turn was to be used."""
    turns = Turns(with_others=False)
    work = getattr(turns, where, lambda: None)

    def interrupted(*given):
        found = work(*given) if after else None
        signal.raise_signal(signal.SIGINT)
        return found if after else work(*given)

    calls = iter([interrupted])

    def once(*given):
        return next(calls, work)(*given)

    monkeypatch.setattr(turns, where, once, raising=False)
    with pytest.raises(KeyboardInterrupt):
        turns.run_next(once if where == "run" else int)
    ended = threading.Thread(target=turns.run_next, args=(int,), daemon=True)
    ended.start()
    ended.join(LONG)
    assert not ended.is_alive()


def in_turns(code):
    names = ("processes/turns", "_changes", "_signals")
    return code.co_filename.endswith(tuple(f"tpu_embed/{name}.py" for name in names))


def use(turns, number):
    """Use a turn as `Turn.place` does."""
    try:
        with turns.use(number):
            return
    except BaseException:
        turns.give_up(number)
        raise


ACTS = {
    "use": use,
    "release": lambda turns, number: (turns.release(number), turns.give_up(number)),
    "give up": lambda turns, number: (turns.give_up(number), turns.give_up(number)),
    "run": lambda turns, number: (turns.release(number), turns.run_next(int)),
}


@pytest.mark.parametrize("with_others", [False, True])
@pytest.mark.parametrize("what", ACTS)
def test_wherever_an_interrupt_comes_no_later_turn_waits_for_ever(what, with_others):
    """A later turn has ended early, so that one release ends two of them."""
    for at in range(1, 1_000):
        turns = Turns(with_others=with_others)
        number, early, later = (turns.draw() for _ in range(3))
        turns.release(early)
        if what == "run":
            turns.release(later)
        with Interrupt(in_turns, at, from_a_signal, only_signals=True) as interrupt:
            ACTS[what](turns, number)
        turns.give_up(number)  # as the finalizer of a turn does that was not used
        ended, found = threading.Event(), []

        def go_on(turns=turns, later=later, ended=ended, found=found):
            try:
                turns.run_next(int) if what == "run" else use(turns, later)
            except RuntimeError as error:
                found.append(str(error))
            ended.set()

        threading.Thread(target=go_on, daemon=True).start()
        assert ended.wait(LONG), at
        assert not found or (with_others and "out of step" in found[0])
        if interrupt.seen < at:
            break
    assert at > 10
