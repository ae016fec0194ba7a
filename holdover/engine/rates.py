"""Whether loading beats computing: pure functions of what both took before."""

from collections.abc import Mapping

FADES_TO = 0.95  # the weight of an observation when the next one is made
LEAST_OBSERVATIONS = 4
TRY_EVERY = 16  # times that loading seemed slower: so that a tier which has become faster is noticed


class Rate:
    """Seconds for an amount of work: a fixed part and one for each unit, by least squares over what was observed."""

    def __init__(self) -> None:
        self.count = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """Older observations fade."""
        self.count += 1
        self._weight = FADES_TO * self._weight + 1.0
        self._x = FADES_TO * self._x + amount
        self._y = FADES_TO * self._y + seconds
        self._xx = FADES_TO * self._xx + amount * amount
        self._xy = FADES_TO * self._xy + amount * seconds

    def estimate(self, amount: float) -> float | None:
        """Seconds; None while too little is known."""
        if self.count < LEAST_OBSERVATIONS or self._x <= 0.0:
            return None
        spread = self._weight * self._xx - self._x * self._x
        each = self._y / self._x
        if spread > 1e-6 * self._weight * self._xx:
            each = (self._weight * self._xy - self._x * self._y) / spread
        fixed = (self._y - each * self._x) / self._weight
        if each < 0.0:  # more took less time: chance, and the mean is the best guess
            return self._y / self._weight
        if fixed < 0.0:
            each, fixed = self._xy / self._xx, 0.0
        return fixed + each * amount


class LoadOrCompute:
    """Learns how long steps and loads take."""

    def __init__(self) -> None:
        self._steps = Rate()
        self._loads: dict[str, Rate] = {}
        self._not_loaded = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step has fed so many tokens."""
        if seconds > 0.0:
            self._steps.observe(num_tokens, seconds)

    def loaded(self, bytes_by_tier: Mapping[str, int], seconds: float) -> None:
        """A load has read so many bytes. Says something of a tier if all of them came from there."""
        if len(bytes_by_tier) == 1 and seconds > 0.0:
            ((tier, nbytes),) = bytes_by_tier.items()
            self._loads.setdefault(tier, Rate()).observe(nbytes, seconds)

    def seconds_to_compute(self, num_tokens: int, most_at_once: int) -> float | None:
        """For a prefill in steps of at most so many tokens; None if that is not known yet."""
        whole, rest = divmod(num_tokens, most_at_once)
        full, last = self._steps.estimate(most_at_once), self._steps.estimate(rest)
        return None if full is None or last is None else whole * full + (last if rest else 0.0)

    def seconds_to_load(self, bytes_by_tier: Mapping[str, int]) -> float | None:
        """For all of it, one tier after the other; None if a tier is not known yet."""
        total = 0.0
        for tier, nbytes in bytes_by_tier.items():
            rate = self._loads.get(tier)
            seconds = None if rate is None else rate.estimate(nbytes)
            if seconds is None:
                return None
            total += seconds
        return total

    def loading_pays(self, bytes_by_tier: Mapping[str, int], num_tokens: int, most_at_once: int) -> bool:
        """Whether to load so much rather than compute so many tokens. What is not known yet is loaded."""
        load, compute = self.seconds_to_load(bytes_by_tier), self.seconds_to_compute(num_tokens, most_at_once)
        if load is None or compute is None or load <= compute:
            return True
        self._not_loaded = (self._not_loaded + 1) % TRY_EVERY
        return self._not_loaded == 0
