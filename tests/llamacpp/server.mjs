// Stock llama.cpp (node-llama-cpp's prebuilt binary) behind one JSON request and reply a line.
// Run in the directory that holds node_modules; see llamacpp.py for the requests.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { closeSync, openSync, writeSync } from "node:fs";
import path from "node:path";

// This file lies outside the directory with node_modules, so the package is resolved from there.
const require = createRequire(path.join(process.cwd(), "package.json"));
const { getLlama } = await import(pathToFileURL(require.resolve("node-llama-cpp")));

const warnings = [];
const llama = await getLlama({
  gpu: false,
  build: "never",
  maxThreads: Number(process.env.LLAMACPP_THREADS ?? 2),
  logLevel: "warn",
  logger: (level, message) => warnings.push(`${level}: ${message}`),
});

let current = null; // { path, vocabOnly, model }: one model at a time, so that memory stays bounded

async function load(modelPath, vocabOnly) {
  if (current?.path === modelPath && current.vocabOnly <= vocabOnly) return current.model;
  await current?.model.dispose();
  current = null;
  const model = await llama.loadModel({ modelPath, vocabOnly, useMmap: true });
  current = { path: modelPath, vocabOnly, model };
  return model;
}

async function withSequence({ model: modelPath, adapter, scale, threads }, size, use) {
  const model = await load(modelPath, false);
  const context = await model.createContext({
    contextSize: Math.max(size, 32),
    batchSize: Math.max(size, 32),
    threads: { ideal: threads, min: 1 },
    flashAttention: false,
    experimentalKvCacheKeyType: "F32",
    experimentalKvCacheValueType: "F32",
    swaFullCache: true,
    lora: adapter ? { adapters: [{ filePath: adapter, scale }] } : undefined,
  });
  try {
    return await use(context.getSequence(), context);
  } finally {
    await context.dispose();
  }
}

const wanted = { generateNext: { logits: true, options: { temperature: 0 } } };

const operations = {
  async tokenize({ model: modelPath, texts, special }) {
    const model = await load(modelPath, true);
    // `tokenizer` of the model adds spaces and trims; the binding underneath is llama.cpp's own function.
    return { tokens: texts.map((text) => Array.from(model._model.tokenize(text, special))) };
  },

  async info({ model: modelPath }) {
    const model = await load(modelPath, true);
    return {
      bos: model.tokens.bos,
      eos: model.tokens.eos,
      eot: model.tokens.eot,
      addsBos: model.tokens.shouldPrependBosToken,
    };
  },

  // Ids below `count` that end a generation.
  async endOfGeneration({ model: modelPath, count }) {
    const model = await load(modelPath, true);
    return { tokens: [...Array(count).keys()].filter((id) => model.isEogToken(id)) };
  },

  async detokenize({ model: modelPath, sequences, special }) {
    const model = await load(modelPath, true);
    return { texts: sequences.map((ids) => model._model.detokenize(Uint32Array.from(ids), special)) };
  },

  // Raw logits after every token, as little-endian float32 (tokens, vocabulary) in the file `out`.
  async logits(request) {
    return await withSequence(request, request.tokens.length, async (sequence, context) => {
      // The binding returns [token, logit, token, logit, ...]. They are taken from there: the Map that the
      // library makes of them costs several seconds for a large vocabulary.
      const rows = [];
      const binding = context._ctx;
      const sampleToken = binding.sampleToken.bind(binding);
      const intercepted = async (...options) => {
        const result = await sampleToken(...options);
        const pairs = result[3];
        const row = new Float32Array(pairs.length / 2);
        for (let at = 0; at < pairs.length; at += 2) row[pairs[at]] = pairs[at + 1];
        rows.push(row);
        result[3] = [];
        return result;
      };
      Object.defineProperty(binding, "sampleToken", { value: intercepted });
      await sequence.controlledEvaluate(request.tokens.map((id) => [id, wanted]));
      const out = openSync(request.out, "w");
      for (const row of rows) writeSync(out, Buffer.from(row.buffer));
      closeSync(out);
      return { vocabulary: rows[0].length };
    });
  },

  // The `count` most likely tokens, one after another; stop tokens do not stop it.
  async greedy(request) {
    return await withSequence(request, request.tokens.length + request.count, async (sequence) => {
      const next = { generateNext: { token: true, options: { temperature: 0 } } };
      const last = request.tokens.length - 1;
      const input = request.tokens.map((id, index) => (index === last ? [id, next] : id));
      const chosen = [];
      let step = (await sequence.controlledEvaluate(input))[last];
      for (;;) {
        chosen.push(step.next.token);
        if (chosen.length === request.count) return { tokens: chosen };
        [step] = await sequence.controlledEvaluate([[step.next.token, next]]);
      }
    });
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  warnings.length = 0;
  let reply;
  try {
    reply = await operations[request.operation](request);
  } catch (error) {
    reply = { error: String(error?.stack ?? error) };
  }
  process.stdout.write(JSON.stringify({ ...reply, warnings }) + "\n");
}
process.exit(0);
