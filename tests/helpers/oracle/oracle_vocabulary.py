"""What a dynamic vocabulary is to do, in plain Python: dictionaries and loops over keys."""

import heapq
import itertools
from collections import defaultdict


class VocabularyOracle:
    """A map from keys to rows, by the letter of the semantics.

    Args:
      num_rows: the rows that keys may have.
      admit_after, evict, ttl, waiting, lookahead: as a `DynamicVocabulary` and its map have them.
    """

    def __init__(self, num_rows, *, admit_after=1, evict="lru", ttl=None, waiting, lookahead=0):
        self.num_rows, self.admit_after, self.evict = num_rows, admit_after, evict
        self.ttl, self.bound, self.lookahead = ttl, waiting, lookahead
        self.step = 0
        self.row_of, self.key_of, self.last, self.seen = {}, {}, {}, {}  # the last three by row
        self.waiting = {}  # key -> count; a dict keeps the order in which they came
        self.free = list(range(num_rows))  # a heap
        self.touched = defaultdict(list)  # step -> rows that its batch had
        self.counters = dict.fromkeys(["admitted", "evicted", "expired", "unseen", "forgotten"], 0)

    def take(self, keys, at_once=False):
        """Take a batch: return the row of each distinct key, new (key, row) pairs, freed rows.

        With `at_once`, every key is admitted for which there is a row, whatever `admit_after` says.
        """
        self.step += 1
        distinct = list(dict.fromkeys(keys))
        for key in distinct:
            if key in self.row_of:
                self._see(self.row_of[key])
        freed = self._expire()
        self.counters["expired"] += len(freed)
        new = []
        for key in [key for key in distinct if key not in self.row_of]:
            self.waiting[key] = self.waiting.get(key, 0) + 1
            due = at_once or self.waiting[key] >= self.admit_after
            row = self._find_room(freed) if due else None
            if row is not None:
                del self.waiting[key]
                self.row_of[key], self.key_of[row], self.seen[row] = row, key, 0
                self._see(row)
                new.append((key, row))
        rows = [self.row_of.get(key, -1) for key in distinct]
        self.counters["admitted"] += len(new)
        self.counters["unseen"] += rows.count(-1)
        for key in list(itertools.islice(self.waiting, max(0, len(self.waiting) - self.bound))):
            del self.waiting[key]
            self.counters["forgotten"] += 1
        return dict(zip(distinct, rows, strict=True)), new, freed

    def _see(self, row):
        self.last[row] = self.step
        self.seen[row] += 1
        if self.ttl is not None:
            self.touched[self.step].append(row)

    def _expire(self):
        if self.ttl is None:
            return []
        past = self.step - max(self.ttl, self.lookahead) - 1
        rows = sorted({row for row in self.touched.pop(past, []) if self.last.get(row) == past})
        for row in rows:
            self._free_row(row)
            heapq.heappush(self.free, row)
        return rows

    def _free_row(self, row):
        del self.row_of[self.key_of[row]], self.key_of[row], self.last[row], self.seen[row]

    def _find_room(self, freed):
        if self.free:
            return heapq.heappop(self.free)
        if self.evict == "none":
            return None
        row = self._victim()
        if row is not None:
            self._free_row(row)
            self.counters["evicted"] += 1
            freed.append(row)
        return row

    def _score(self, row):
        score = self.last[row], row
        return (self.seen[row], *score) if self.evict == "lfu" else score

    def _is_protected(self, row):
        return self.last[row] >= self.step - self.lookahead

    def _victim(self):
        rows = [row for row in self.last if not self._is_protected(row)]
        return min(rows, key=self._score, default=None)

    def state(self):
        """Return everything that a map knows, as lists."""
        rows = sorted(self.key_of)
        by_row = {"keys": self.key_of, "last_seen": self.last, "batches_seen": self.seen}
        found = {name: [numbers[row] for row in rows] for name, numbers in by_row.items()}
        waiting = {"waiting_keys": [*self.waiting], "waiting_counts": [*self.waiting.values()]}
        rest = {"rows": rows, "step": self.step, "counters": [*self.counters.values()]}
        return found | waiting | rest


class HeapOracle(VocabularyOracle):
    """The same, with a heap of scores instead of a loop over all rows, for long streams.

    While a key has a row, its score only grows. So an entry of the heap is too low at worst, which
    is noticed and put right when it is the lowest.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.heap, self.aside = [], []  # (score, row, key)

    def take(self, keys, at_once=False):
        result = super().take(keys, at_once)
        for entry in self.aside:
            heapq.heappush(self.heap, entry)
        self.aside = []
        return result

    def _see(self, row):
        super()._see(row)
        if self.seen[row] == 1:
            heapq.heappush(self.heap, (self._score(row), row, self.key_of[row]))

    def _victim(self):
        while self.heap:
            score, row, key = heapq.heappop(self.heap)
            if self.key_of.get(row) != key:
                continue
            true = self._score(row)
            if self._is_protected(row):
                self.aside.append((true, row, key))
            elif true != score:
                heapq.heappush(self.heap, (true, row, key))
            else:
                return row
        return None
