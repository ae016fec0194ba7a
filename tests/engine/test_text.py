"""Stop strings in growing text, however it is cut."""

from hypothesis import given
from hypothesis import strategies as st

from holdover.engine.text import StopStrings, StreamDecoder

TEXT = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3)


@given(st.lists(TEXT, max_size=8), STOPS)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(parts: list[str], stops: list[str]) -> None:
    finder = StopStrings(tuple(stops))
    given_out = ""
    seen = ""
    for part in parts:
        if finder.found:
            break
        seen += part
        given_out += finder.add(part)
        assert not any(stop in given_out for stop in stops)
    if not finder.found:
        given_out += finder.flush()
    places = [seen.find(stop) for stop in stops if stop in seen]
    assert finder.found == bool(places)
    assert given_out == (seen[: min(places)] if places else seen)


def test_a_character_of_many_tokens_comes_whole() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "né → 🌍 end"
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.add(token) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
