// Numbers and times as people read them.

export const dollars = (value, digits = 2) =>
  value === null || value === undefined ? "–" : `$${value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })}`;

export const number = (value, digits = 0) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en-US", { maximumFractionDigits: digits });

export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds)) return "–";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = seconds / 60;
  if (minutes < 60) return `${Math.floor(minutes)} min ${Math.round(seconds % 60)} s`;
  const hours = minutes / 60;
  if (hours < 48) return `${Math.floor(hours)} h ${Math.floor(minutes % 60)} min`;
  return `${(hours / 24).toFixed(1)} days`;
}

export function ago(time, now = Date.now() / 1000) {
  if (!time) return "–";
  const seconds = Math.max(0, now - time);
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} days ago`;
}

export const clock = (time) => (time ? new Date(time * 1000).toLocaleString() : "–");

export function big(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (value >= size) return `${(value / size).toPrecision(3)} ${unit}`;
  return value.toPrecision(3);
}

export const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(1)} GiB`;

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);

export const mib = (bytes) => (bytes >= 2 ** 30 ? gib(bytes) : `${Math.round(bytes / 2 ** 20)} MiB`);
