// Stock llama.cpp (node-llama-cpp's prebuilt binary) behind one JSON request and reply a line.
// Run in the directory that holds node_modules; see llamacpp.py for the requests.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { writeFileSync } from "node:fs";
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
    return await use(context.getSequence());
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

  async detokenize({ model: modelPath, sequences, special }) {
    const model = await load(modelPath, true);
    return { texts: sequences.map((ids) => model._model.detokenize(Uint32Array.from(ids), special)) };
  },

  // Raw logits after every token, as little-endian float32 (tokens, vocabulary) in the file `out`.
  async logits(request) {
    return await withSequence(request, request.tokens.length, async (sequence) => {
      const steps = await sequence.controlledEvaluate(request.tokens.map((id) => [id, wanted]));
      const vocabulary = steps[0].next.logits.size;
      const flat = new Float32Array(steps.length * vocabulary);
      steps.forEach((step, row) => {
        for (const [token, logit] of step.next.logits) flat[row * vocabulary + token] = logit;
      });
      writeFileSync(request.out, Buffer.from(flat.buffer));
      return { vocabulary };
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
