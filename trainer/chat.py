"""A chat as tokens, through the tokenizer's own template; the assistant's turns carry the loss.

A turn's tokens are found by rendering the chat up to it (as a server does, with the generation prompt) and
the chat with it: the second must go on where the first ends, or else the row is refused. So the policy learns
exactly after the prompts that it will be asked with.
"""

from __future__ import annotations

from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from ..shared.errors import ConfigError
from .example import Example, with_loss_on

Message = dict[str, Any]


def chat_example(where: str, messages: Any, tokenizer: PreTrainedTokenizerBase) -> Example:
    """The whole chat; `where` names the row in errors."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{where} has `messages`, but this base's tokenizer has no chat template; "
            "give rows of `prompt` and `completion`, or a base made for chats"
        )
    chat = _checked(where, messages)
    try:
        whole = _tokens(tokenizer, chat, is_asked=False)
        turns = [number for number, message in enumerate(chat) if message["role"] == "assistant"]
        spans = [_turn(where, chat, number, whole, tokenizer) for number in turns]
    except TemplateError as error:
        raise ConfigError(f"{where}: the base's chat template refuses these messages: {error}") from None
    return with_loss_on(whole, spans)


def _checked(where: str, messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f"{where}: `messages` must be a list of objects with `role` and `content`")
    for number, message in enumerate(messages, start=1):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ConfigError(
                    f"{where}: message {number}: `{key}` must be a string, {message.get(key)!r} found"
                )
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(
            f"{where}: no message is the assistant's, so there is nothing to learn; take it out"
        )
    return messages


def _turn(
    where: str, chat: list[Message], number: int, whole: list[int], tokenizer: PreTrainedTokenizerBase
) -> range:
    """Where the tokens of one assistant message stand, its end token included."""
    before = _tokens(tokenizer, chat[:number], is_asked=True)
    after = _tokens(tokenizer, chat[: number + 1], is_asked=False)
    if after[: len(before)] != before or whole[: len(after)] != after:
        raise ConfigError(
            f"{where}: message {number + 1}: the base's chat template renders this turn differently before "
            "and after it is known, so its tokens cannot be told; give this row as `prompt` and `completion`"
        )
    end = len(after)
    eos_id = tokenizer.eos_token_id
    if eos_id in after[len(before) :]:  # a template's line break after it is never asked of the policy
        end = len(after) - after[::-1].index(eos_id)
    return range(len(before), end)


def _tokens(tokenizer: PreTrainedTokenizerBase, chat: list[Message], *, is_asked: bool) -> list[int]:
    # An empty chat is what a policy that speaks first is asked with; templates may index its first message.
    if not chat and not is_asked:
        return []
    tokens = tokenizer.apply_chat_template(
        chat, tokenize=True, add_generation_prompt=is_asked, return_dict=False
    )
    return list(tokens)  # type: ignore[arg-type]
