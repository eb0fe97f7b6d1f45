// A load from outside, with nothing of ours but what the server's reflection says: k6 streams replies,
// and checks every message.
//
//   k6 run --no-usage-report -e TARGET=localhost:50051 tools/load_test.k6.js
//
// Further settings: STREAMS (16), DURATION ("30s"), MAX_TOKENS (64), BAD (0.05: share of bad requests).
// The exit status is 99 when a threshold is crossed.
import { check } from 'k6';
import grpc from 'k6/net/grpc';
import { Counter, Trend } from 'k6/metrics';

const TARGET = __ENV.TARGET || 'localhost:50051';
const MAX_TOKENS = Number(__ENV.MAX_TOKENS || 64);
const BAD = Number(__ENV.BAD || 0.05);
const METHOD = 'tandem.v1.InferenceService/Generate';
const INVALID_ARGUMENT = 3;
const RESOURCE_EXHAUSTED = 8;
const PROMPTS = ['def main():', 'class Tree:\n    ', 'import os\n', 'for line in lines:'];

const completed = new Counter('tandem_completed');
const refused = new Counter('tandem_refused');
const tokens = new Counter('tandem_tokens');
const firstToken = new Trend('tandem_first_token', true);
const perToken = new Trend('tandem_time_per_token', true);

export const options = {
  vus: Number(__ENV.STREAMS || 16),
  duration: __ENV.DURATION || '30s',
  thresholds: { checks: ['rate==1'], tandem_completed: ['count>0'] },
};

const client = new grpc.Client();
let connected = false;

function connect() {
  client.connect(TARGET, { plaintext: true, reflect: true });
}

// Once alone, before the streams begin: k6 panics when several learn the same types at the same time.
export function setup() {
  connect();
  client.close();
}

// What a reply must be: numbers without gaps, Started, tokens, Finished.
function emptyReply() {
  return { messages: 0, gaps: 0, started: false, finished: null, tokens: 0, firstAt: 0, lastAt: 0 };
}

function take(reply, message) {
  // Zeros are left out of JSON.
  if ((message.sequence || 0) !== reply.messages) reply.gaps += 1;
  reply.messages += 1;
  if (message.started) reply.started = true;
  if (message.finished) reply.finished = message.finished;
  if (message.delta) {
    reply.lastAt = Date.now();
    reply.firstAt = reply.firstAt || reply.lastAt;
    reply.tokens += (message.delta.tokenIds || []).length;
  }
}

function generate(request) {
  return new Promise((resolve) => {
    const reply = emptyReply();
    const stream = new grpc.Stream(client, METHOD);
    stream.on('data', (message) => take(reply, message));
    stream.on('error', (error) => resolve({ reply, error }));
    stream.on('end', () => resolve({ reply, error: null }));
    stream.write(request);
    stream.end();
  });
}

function record(reply, begunAt) {
  completed.add(1);
  tokens.add(reply.tokens);
  firstToken.add(reply.firstAt - begunAt);
  if (reply.tokens > 1) perToken.add((reply.lastAt - reply.firstAt) / (reply.tokens - 1));
}

export default async function () {
  if (!connected) {
    connect();
    connected = true;
  }
  const bad = Math.random() < BAD;
  const begunAt = Date.now();
  const { reply, error } = await generate({
    text: PROMPTS[Math.floor(Math.random() * PROMPTS.length)],
    sampling: { temperature: bad ? 3 : 0.8, seed: __ITER },
    stopping: { maxTokens: 1 + Math.floor(Math.random() * MAX_TOKENS) },
    include: { tokenIds: true },
  });
  if (bad) {
    check(error, {
      'a bad request is refused': (e) => e !== null && Number(e.code) === INVALID_ARGUMENT,
      'the refusal names the field': (e) => e !== null && e.message.includes('sampling.temperature'),
    });
  } else if (error !== null) {
    refused.add(1);
    check(error, { 'a refusal is for want of room': (e) => Number(e.code) === RESOURCE_EXHAUSTED });
  } else {
    check(reply, {
      'messages have no gaps': (r) => r.gaps === 0,
      'the reply begins and ends': (r) => r.started && r.finished !== null,
      'every token came': (r) => r.finished && r.finished.usage.completionTokens === r.tokens,
    });
    record(reply, begunAt);
  }
}
