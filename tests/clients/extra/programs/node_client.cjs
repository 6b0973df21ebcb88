// The official Node client: whole, streamed, parsed, tools, responses, errors.  node node_client.cjs URL MODEL
const assert = require("node:assert");
const OpenAI = require("openai");

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France? Answer in one word." }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", description: "Of a city", parameters } }];

async function main() {
  assert.deepStrictEqual((await client.models.list()).data.map((one) => one.id), [model]);

  const ask = { model, messages, temperature: 0, max_tokens: 24 };
  const whole = await client.chat.completions.create(ask);
  const text = whole.choices[0].message.content;
  assert.match(text, /Paris/);

  let streamed = "";
  let usage;
  const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.strictEqual(streamed, text);
  assert.deepStrictEqual(usage.completion_tokens, whole.usage.completion_tokens);

  const helper = client.chat.completions.stream(ask);
  assert.strictEqual((await helper.finalChatCompletion()).choices[0].message.content, text);

  const called = await client.chat.completions.create({ ...ask, tools, tool_choice: "required", max_tokens: 60 });
  const call = called.choices[0].message.tool_calls[0];
  assert.deepStrictEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
  assert.strictEqual(called.choices[0].finish_reason, "tool_calls");

  const response_format = { type: "json_schema", json_schema: { name: "place", strict: true, schema: parameters } };
  const parsed = await client.chat.completions.parse({ ...ask, response_format, max_tokens: 60 });
  assert.deepStrictEqual(Object.keys(JSON.parse(parsed.choices[0].message.content)), ["city"]);

  const response = await client.responses.create({ model, input: messages, temperature: 0 });
  assert.strictEqual(response.output_text, text);
  const events = client.responses.stream({ model, input: messages, temperature: 0 });
  assert.strictEqual((await events.finalResponse()).output_text, text);

  const [one, two] = (await client.completions.create({ model, prompt: ["1, 2,", "a, b,"], max_tokens: 4 })).choices;
  assert.deepStrictEqual([one.index, two.index], [0, 1]);

  await assert.rejects(client.chat.completions.create({ ...ask, top_p: 7 }), (error) => {
    return error instanceof OpenAI.BadRequestError && error.param === "top_p";
  });

  const cut = await client.chat.completions.create({ ...ask, max_tokens: 500, ignore_eos: true, stream: true });
  for await (const chunk of cut) if (chunk.choices[0]?.delta?.content) break;
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
