"""What the server and the engine say to each other, as typed MessagePack."""

import msgspec


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen, and when to stop. Bounds are checked where requests come in."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report beside the chosen token; None for no report


class Generate(msgspec.Struct, tag="generate"):
    """A request. prompt: little-endian uint32 token ids. boundaries: positions of message boundaries in it.

    id is never reused. salt: the tenant's secret; state is never shared across salts.
    """

    id: int
    prompt: bytes
    sampling: Sampling
    n: int = 1
    boundaries: tuple[int, ...] = ()
    salt: str = ""
    session: str | None = None


class Cancel(msgspec.Struct, tag="cancel"):
    """The client of a request has gone."""

    id: int


class AskStatistics(msgspec.Struct, tag="ask_statistics"):
    """Asks for a Statistics message with the same id."""

    id: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    """End: finish saving, then exit."""


ToEngine = Generate | Cancel | AskStatistics | Shutdown


class TokenLogprob(msgspec.Struct):
    """Log-probability of a chosen token, and of the best alternatives: (token id, log-probability)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class Usage(msgspec.Struct):
    """What a request cost, counted when it started. reused: prompt tokens by the place that their state came from.

    computed: prompt tokens that were fed to the model, again ones after a preemption included.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    computed: int = 0
    reused: dict[str, int] = {}


class Output(msgspec.Struct, tag="output"):
    """New tokens of one choice of a request. finish_reason and usage come with the last of them."""

    id: int
    index: int
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[TokenLogprob] = []
    finish_reason: str | None = None
    usage: Usage | None = None


class Failed(msgspec.Struct, tag="failed"):
    """A request can't be served."""

    id: int
    message: str
    status: int = 400
    code: str | None = None


class Ready(msgspec.Struct, tag="ready"):
    """The engine serves. Facts of the model and of the memory it has."""

    context_length: int
    max_request_tokens: int  # prompt and answer, as far as context and device memory reach
    vocab_size: int
    eos_token_ids: list[int]
    bytes_per_token: int
    bytes_per_snapshot: int
    device_bytes: int
    max_running: int
    fingerprint: str
    peer_address: str | None = None  # where peers may read from it


class StartFailed(msgspec.Struct, tag="start_failed"):
    """The engine can't start; the message is for the user."""

    message: str


class Statistics(msgspec.Struct, tag="statistics"):
    """Counters since the start, and gauges of this moment, by Prometheus name; labels are in the key's second part."""

    id: int
    counters: dict[str, float]
    gauges: dict[str, float]
    by_tier: dict[str, dict[str, float]]


FromEngine = Output | Failed | Ready | StartFailed | Statistics
