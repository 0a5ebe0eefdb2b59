// Tokenises strings with stock llama.cpp, to compare retrograd's tokenizers with it.
//
// Installed once, without a compiler, in any directory (the prebuilt binary holds llama.cpp):
//   npm install node-llama-cpp@3.22.1 @node-llama-cpp/linux-x64@3.22.1 --ignore-scripts --omit=optional
// Run in that directory, so that node finds the package:
//   node tokenize.mjs MODEL.gguf VOCABULARY_SIZE < strings.jsonl > ids.jsonl
//
// stdin: one JSON string a line. stdout: first {"bos", "eos", "eot", "prepend_bos", "eog": [...]}, where eog lists
// the ids below VOCABULARY_SIZE that end a generation; then for each string {"plain": ids, "special": ids with
// special tokens parsed, "text": the plain ids as text}.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.cwd()}/`);
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(require.resolve("node-llama-cpp")).href);
const llama = await getLlama({ gpu: false, build: "never", logLevel: LlamaLogLevel.error });
const model = await llama.loadModel({ modelPath: process.argv[2], vocabOnly: true });
const count = Number(process.argv[3] ?? 0);
const eog = [];
for (let id = 0; id < count; id++) if (model.isEogToken(id)) eog.push(id);
const { bos, eos, eot } = model.tokens;
console.log(JSON.stringify({ bos, eos, eot, prepend_bos: model.tokens.shouldPrependBosToken, eog }));
for await (const line of createInterface({ input: process.stdin })) {
  const text = JSON.parse(line);
  const plain = model.tokenize(text, false);
  console.log(JSON.stringify({ plain, special: model.tokenize(text, true), text: model.detokenize(plain, true) }));
}
// Exit only once the pipe has taken everything; llama.cpp's threads would keep the process alive.
process.stdout.end(() => process.exit(0));
