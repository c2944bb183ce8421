"""``response_format``, ``structured_outputs`` and a forced tool call, as the one thing the engine knows: a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pagedkv.engine.params import SamplingParams
from pagedkv.engine.structured import StructuredOutputsParams
from pagedkv.errors import InvalidRequest
from pagedkv.server.schema import GenerationBody
from pagedkv.server.serving import Params
from pagedkv.server.tools import call_grammar


def structure_of(body: GenerationBody, forced_tools: Sequence[dict[str, Any]] | None) -> StructuredOutputsParams | None:
    """The grammar that a body asks for, or None.

    Raises:
        InvalidRequest: more than one of the three ways at once, or one that is not whole.
    """
    wanted: list[StructuredOutputsParams] = []
    if (structured := body.structured_outputs) is not None:
        wanted.append(
            StructuredOutputsParams(
                json=structured.json_,
                regex=structured.regex,
                choice=structured.choice,
                grammar=structured.grammar,
                json_object=structured.json_object,
            )
        )
    if (form := body.response_format) is not None and form.type != "text":
        if form.type == "json_object":
            wanted.append(StructuredOutputsParams(json_object=True))
        elif form.json_schema is None or not isinstance(form.json_schema.schema_, dict):
            raise InvalidRequest("response_format.json_schema.schema: is missing", field="response_format")
        else:
            wanted.append(StructuredOutputsParams(json=form.json_schema.schema_))
    if forced_tools:
        wanted.append(StructuredOutputsParams(grammar=call_grammar(forced_tools)))
    if len(wanted) > 1:
        raise InvalidRequest(
            "response_format, structured_outputs and a forced tool_choice exclude each other", field="response_format"
        )
    return wanted[0] if wanted else None


def with_structure(
    params: Params, body: GenerationBody, forced_tools: Sequence[dict[str, Any]] | None = None
) -> Params:
    structure = structure_of(body, forced_tools)
    if structure is None:
        return params
    if not isinstance(params, SamplingParams):
        raise InvalidRequest("use_beam_search: does not go together with a grammar", field="use_beam_search")
    return replace(params, structured_outputs=structure)
