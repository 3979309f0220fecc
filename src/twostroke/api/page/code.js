/**
 * Return a request as a curl command. The key appears as an environment variable.
 * @param {{path: string, body: object}} request
 * @param {string} origin of the server
 * @param {boolean} hasKey whether the server needs a key
 */
export function asCurl({ path, body }, origin, hasKey) {
  const words = ["curl", "-N", origin + path, "-H", "'Content-Type: application/json'"];
  if (hasKey) words.push("-H", '"Authorization: Bearer $TWOSTROKE_API_KEY"');
  words.push("-d", shellQuoted(JSON.stringify({ ...body, stream: true })));
  return words.join(" ");
}

const OPENAI_FIELDS = [
  ...["model", "prompt", "messages", "temperature", "top_p", "max_tokens", "seed", "stop"],
  ...["logprobs", "top_logprobs", "response_format"],
];

/**
 * Return a request as a program for OpenAI's Python client. The key appears as an environment variable.
 * @param {{path: string, body: object}} request
 * @param {string} origin of the server
 * @param {boolean} hasKey whether the server needs a key
 */
export function asOpenaiPython({ path, body }, origin, hasKey) {
  const isChat = "messages" in body;
  const given = Object.entries(body);
  const own = given.filter(([name]) => OPENAI_FIELDS.includes(name));
  const others = given.filter(([name]) => !OPENAI_FIELDS.includes(name));
  const lines = own.map(([name, value]) => `    ${name}=${inPython(value)},`);
  if (others.length > 0) lines.push(`    extra_body=${inPython(Object.fromEntries(others))},`);
  const text = isChat ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  const base = path.replace(/\/(chat\/)?completions$/, "");
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${origin}${base}", api_key=${hasKey ? 'os.environ["TWOSTROKE_API_KEY"]' : '"none"'})
stream = client.${isChat ? "chat." : ""}completions.create(
${lines.join("\n")}
    stream=True,
)
for chunk in stream:
    print(${text} or "", end="", flush=True)
`;
}

/** Return a JSON value in Python syntax: true, false and null differ, strings are the same. */
function inPython(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(inPython).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value)
    .map(([name, each]) => `${JSON.stringify(name)}: ${inPython(each)}`)
    .join(", ")}}`;
}

/** Return text quoted as one word of a POSIX shell. */
function shellQuoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
