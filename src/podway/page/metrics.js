// The metrics of training runs, as they come: one stream for each run that somebody looks at.

import { useEffect, useState } from "./vendor/preact-htm.js";
import { lines } from "./api.js";

export const MEASURES = ["loss", "eval_loss", "tokens_per_second", "mfu", "grad_norm", "goodput", "seconds", "rate"];
const runs = new Map(); // "cluster/job" -> Run

// Pure: take steps in. A run that goes on from a checkpoint repeats steps: what it says now replaces what was said before.
export function take(series, steps) {
  for (const one of steps) {
    for (const name of MEASURES) {
      const value = one[name];
      if (value === undefined || value === null) continue;
      const { x, y } = series[name];
      while (x.length && x[x.length - 1] >= one.step) {
        x.pop();
        y.pop();
      }
      x.push(one.step);
      y.push(value);
    }
  }
}

export const empty = () => Object.fromEntries(MEASURES.map((name) => [name, { x: [], y: [] }]));

// Pure: the median of what comes after the first steps, which compile.
export function steady(values, warmUp = 3) {
  const sorted = values.slice(Math.min(warmUp, Math.max(0, values.length - 1))).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

// Pure: an exponential mean, as people smooth a loss.
export function smooth(values, weight) {
  let held = null;
  let share = 1;
  return values.map((value) => {
    held = held === null ? value * (1 - weight) : held * weight + value * (1 - weight);
    share *= weight;
    return held / (1 - share);
  });
}

class Run {
  constructor(key) {
    this.key = key;
    this.series = empty();
    this.devices = 1;
    this.profile = null;
    this.ended = false;
    this.error = null;
    this.version = 0;
    this.listeners = new Set();
    this.stop = new AbortController();
    this.follow();
  }

  async follow() {
    const [cluster, job] = this.key.split("/");
    let cursor = "";
    let wait = 500;
    while (!this.stop.signal.aborted && !this.ended) {
      try {
        const query = cursor ? `?cursor=${encodeURIComponent(cursor)}` : "";
        await lines(`/v1/clusters/${encodeURIComponent(cluster)}/jobs/${job}/metrics${query}`, this.stop.signal, (frame) => {
          if (frame.devices) this.devices = frame.devices;
          if (frame.profile) this.profile = frame.profile;
          if (frame.steps.length) take(this.series, frame.steps);
          cursor = frame.cursor || cursor;
          this.ended = this.ended || frame.ended;
          this.error = null;
          wait = 500;
          if (frame.steps.length || frame.ended || frame.profile) this.draw();
        });
      } catch (error) {
        if (this.stop.signal.aborted) return;
        this.error = error;
        this.draw();
        if (error.status >= 400 && error.status < 500) return;
      }
      if (this.ended) return;
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(wait * 2, 10000);
    }
  }

  // Once a frame, however fast steps come.
  draw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.version += 1;
      for (const listener of this.listeners) listener({});
    });
  }
}

// The runs of these keys; what nobody looks at any more is dropped.
export function useRuns(keys) {
  const [, update] = useState({});
  useEffect(() => {
    for (const key of keys) {
      if (!runs.has(key)) runs.set(key, new Run(key));
      runs.get(key).listeners.add(update);
    }
    update({});
    return () => {
      for (const key of keys) {
        const run = runs.get(key);
        run.listeners.delete(update);
        if (!run.listeners.size) {
          run.stop.abort();
          runs.delete(key);
        }
      }
    };
  }, [keys.join()]);
  return keys.map((key) => runs.get(key)).filter(Boolean);
}
