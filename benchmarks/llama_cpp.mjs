// Stock llama.cpp (node-llama-cpp's prebuilt binary): prompt processing or batched generation, one JSON line.
// usage: node llama_cpp.mjs '{"nodeDir", "model", "threads", "steps", "warmup", "prompt", "sequences"?, "tokens"?}'
//
// Without `sequences` the prompt is timed, with it the generation after the prompt. Sampling is greedy, the
// cheapest there is, and stop tokens do not stop it. The KV cache is F16 and flash attention "auto": the defaults.
import { readFileSync, writeFileSync, writeSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import { performance } from "node:perf_hooks";
import { pathToFileURL } from "node:url";

const MAX_BATCH = 512;
const { nodeDir, model: modelPath, threads, steps, warmup, prompt, sequences = 1, tokens = 0 } = JSON.parse(
  process.argv[2],
);

// This file lies outside the directory with node_modules, so the package is resolved from there.
const require = createRequire(path.resolve(nodeDir, "package.json"));
const entry = require.resolve("node-llama-cpp");
const { getLlama } = await import(pathToFileURL(entry));

const llama = await getLlama({
  gpu: false,
  build: "never",
  maxThreads: threads,
  logLevel: "error",
  logger: (_level, message) => writeSync(2, message + "\n"),
});
const model = await llama.loadModel({ modelPath });

// Called once a llama_decode: shows how many sequences each of them really took.
const batch = { decodes: 0, items: 0 };
function countBatches({ items, size }) {
  let left = size;
  const taken = [];
  for (const item of items) {
    const processAmount = Math.min(item.tokens.length, left);
    if (processAmount === 0) break;
    left -= processAmount;
    taken.push({ item, processAmount });
  }
  batch.decodes += 1;
  batch.items += taken.length;
  return taken;
}

const context = await model.createContext({
  contextSize: prompt + tokens + 1,
  sequences,
  batchSize: Math.max(Math.min(prompt, MAX_BATCH), sequences),
  threads: { ideal: threads, min: threads },
  batching: {
    itemPrioritizationStrategy: countBatches,
    // Two turns of the event loop, within which every sequence has queued its token.
    dispatchSchedule: (dispatch) => setImmediate(() => setImmediate(dispatch)),
  },
});
// Plain ids in the vocabulary of any model; what they say does not matter to the time.
const ids = Array.from({ length: prompt }, (_, index) => 1000 + ((index * 7919) % 40000));
const all = Array.from({ length: sequences }, () => context.getSequence());
const highWater = () => {
  try {
    return Number(/^VmHWM:\s+(\d+)/m.exec(readFileSync("/proc/self/status", "utf8"))[1]) / 1024;
  } catch {
    return process.resourceUsage().maxRSS / 1024;
  }
};
const whileLoading = highWater();
try {
  writeFileSync("/proc/self/clear_refs", "5"); // a new peak from here on, as the Python contestants have it
} catch {
  // Not Linux: the peak is that of the whole process.
}

async function readPrompt(sequence, upTo) {
  const wanted = ids.slice(0, upTo);
  await sequence.adaptStateToTokens(wanted, false); // drops what an earlier sample generated
  const missing = wanted.slice(sequence.nextTokenIndex);
  if (missing.length > 0) await sequence.evaluateWithoutGeneratingNewTokens(missing);
}

async function timePrompt() {
  await all[0].clearHistory();
  const start = performance.now();
  await all[0].evaluateWithoutGeneratingNewTokens(ids);
  return (performance.now() - start) / 1000;
}

const nextToken = { generateNext: { token: true, options: { temperature: 0 } } };

// All sequences advance together: with independent generators the first to be sampled would start the next
// llama_decode without the others, and llama.cpp would look slower than it is.
async function generate(count) {
  let current = all.map(() => ids.at(-1)); // evaluated here, so that every step counts one token a sequence
  for (let step = 0; step < count; step++) {
    const results = await Promise.all(
      all.map((sequence, index) => sequence.controlledEvaluate([[current[index], nextToken]])),
    );
    current = results.map(([result]) => result.next.token);
  }
}

async function timeGeneration(count) {
  for (const sequence of all) await readPrompt(sequence, prompt - 1);
  batch.decodes = batch.items = 0;
  const start = performance.now();
  await generate(count);
  const seconds = (performance.now() - start) / 1000;
  if (batch.decodes !== count) throw new Error(`${batch.decodes} decodes for ${count} tokens of ${sequences} sequences`);
  return seconds;
}

const sample = tokens > 0 ? timeGeneration : timePrompt;
for (let count = 0; count < warmup; count++) await sample(Math.min(tokens, 8));
const samples = [];
for (let count = 0; count < steps; count++) samples.push(await sample(tokens));
const ordered = samples.toSorted((a, b) => a - b);
const middle = ordered.length >> 1;
const median = ordered.length % 2 ? ordered[middle] : (ordered[middle - 1] + ordered[middle]) / 2;
const work = tokens > 0 ? sequences * tokens : prompt;
const peakMb = Math.round(highWater() * 10) / 10;
const processPeakMb = Math.max(peakMb, Math.round(whileLoading * 10) / 10);
const { version } = JSON.parse(readFileSync(path.join(nodeDir, "node_modules/node-llama-cpp/package.json"), "utf8"));
const result = {
  seconds: median,
  rate: work / median,
  samples,
  peak_mb: peakMb,
  process_peak_mb: processPeakMb,
  versions: {
    node: process.version,
    "node-llama-cpp": version,
    "llama.cpp": llama.llamaCppRelease.release,
  },
  processor_features: llama.systemInfo.trim(),
  sequences_per_decode: tokens > 0 ? batch.items / batch.decodes : 1,
};
writeSync(1, JSON.stringify(result) + "\n");
process.exit(0);
