"""LangChain's ChatOpenAI: invoke, stream, batch, tools and structured output.  python langchain_client.py URL MODEL"""

import asyncio
import sys

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city and its country."""

    name: str = Field(max_length=16)
    country: str = Field(max_length=16)


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"18 degrees in {city}"


def main(url: str, model: str) -> None:
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=24)
    question = [HumanMessage("Tell me about the sea.")]
    whole = chat.invoke(question)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] == 24, whole.usage_metadata
    chunks = list(chat.stream(question))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert asyncio.run(chat.ainvoke(question)).content == whole.content
    assert [answer.content for answer in chat.batch([question, question])] == [whole.content] * 2

    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(question)
    assert len(scored.response_metadata["logprobs"]["content"]) == 24

    called = chat.bind_tools([weather], tool_choice="any").bind(max_tokens=60).invoke("What is the weather in Rome?")
    [call] = called.tool_calls
    assert call["name"] == "weather", call
    assert set(call["args"]) == {"city"}, call
    result = ToolMessage("18 degrees", tool_call_id=call["id"])
    assert isinstance(chat.bind_tools([weather]).invoke([HumanMessage("Rome?"), called, result]), AIMessage)

    longer = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=80)
    for method in ("json_schema", "function_calling"):
        answer = longer.with_structured_output(City, method=method).invoke("Name a city.")
        assert isinstance(answer, City), (method, answer)

    responses = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=24, use_responses_api=True
    )
    assert responses.invoke(question).text == whole.content

    completion = OpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=8)
    assert completion.invoke("1, 2, 3,")


if __name__ == "__main__":
    main(*sys.argv[1:])
