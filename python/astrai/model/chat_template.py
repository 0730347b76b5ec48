"""Chat templates: the Jinja program of a model file that turns messages into prompt text."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any


class ChatTemplate:
    """A chat template, run in Jinja's sandbox (it comes from a downloaded file).

    Args:
        source: The Jinja source.
        special_tokens: Variables for the template, such as ``bos_token``.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise ValueError(
                f"ChatTemplate: messages must suit the model's template, got: {message}"
            )

        def tojson(value: Any, indent: int | None = None) -> str:
            return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own escapes HTML

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"ChatTemplate: source must be a Jinja template, got an error: {error}"
            ) from error
        self._special_tokens = dict(special_tokens or {})

    def render(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Turns messages into prompt text.

        Args:
            messages: Each with "role" ("system", "user", "assistant") and "content".
            add_generation_prompt: Whether the text ends where the assistant's answer begins.

        Raises:
            ValueError: A message lacks its strings, or the template fails on the messages.
        """
        for i, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise ValueError(
                        f"ChatTemplate.render: messages[{i}][{key!r}] must be a string, got "
                        f"{message.get(key)!r}"
                    )
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except ValueError:  # by the template itself, see raise_exception
            raise
        except (
            Exception
        ) as error:  # the template is a program of the model file and may do anything
            raise ValueError(
                f"ChatTemplate.render: messages must suit the template, got: {error}"
            ) from error
