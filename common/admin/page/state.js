// What all views share: the last picture, the history, rates from one picture to the next, and small helpers.
export const TTFT_BOUNDS = [0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30];
export const TPOT_BOUNDS = [0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5];
export const STEP_S = 5;

export const state = { picture: null, history: new Map(), rates: new Map(), focusFilter: false, filters: { text: '', slow: false, failed: false } };

let before = new Map();  // path/endpoint -> [time, picks]

export function rememberRates() {
  const at = performance.now() / 1000;
  for (const [path, pool] of Object.entries(state.picture.pools)) {
    for (const [id, e] of Object.entries(pool.endpoints)) {
      const key = `${path}/${id}`, seen = before.get(key), picks = e.picks || 0;
      if (seen && picks >= seen[1] && at > seen[0]) {
        const fresh = (picks - seen[1]) / (at - seen[0]), old = state.rates.get(key);
        state.rates.set(key, old === undefined ? fresh : 0.7 * old + 0.3 * fresh);
      }
      before.set(key, [at, picks]);
    }
  }
}

// The steps of the last `count`, oldest first, with gaps as null; the present one is not over and left out.
export function steps(count) {
  const last = Math.floor(Date.now() / 5000) - 1, found = [];
  for (let k = last - count + 1; k <= last; k++) found.push([k * STEP_S, state.history.get(k) || null]);
  return found;
}

export function summed(count, name) {
  let sum = null;
  for (const [, step] of steps(count)) if (step) sum = sum ? sum.map((x, i) => x + step[name][i]) : step[name].slice();
  return sum;
}

// A quantile of counts by upper bound, interpolated within its bucket; null when nothing was counted.
export function quantile(counts, bounds, q) {
  const all = counts ? counts.reduce((a, b) => a + b, 0) : 0;
  if (!all) return null;
  let left = q * all;
  for (let i = 0; i < counts.length; i++) {
    if (left <= counts[i] && counts[i]) {
      const low = i ? bounds[i - 1] : 0, high = i < bounds.length ? bounds[i] : bounds[bounds.length - 1];
      return low + (high - low) * left / counts[i];
    }
    left -= counts[i];
  }
  return bounds[bounds.length - 1];
}

export function totals() {
  const p = state.picture, minute = steps(12).map(([, s]) => s).filter(Boolean);
  const recent = steps(6).map(([, s]) => s).filter(Boolean);
  const instances = Object.entries(p.pools).filter(([path]) => path.split('/').length === 2 && path).flatMap(([, pool]) => Object.values(pool.endpoints));
  const ttft = summed(12, 'ttft'), tpot = summed(12, 'tpot');
  return {
    rate: recent.reduce((a, s) => a + s.ok + s.failed + s.refused + s.left, 0) / 30,
    inFlight: p.processes.filter(x => x.node === '').reduce((a, x) => a + x.in_flight, 0) || Math.max(0, ...p.processes.map(x => x.in_flight)),
    queued: p.processes.reduce((a, x) => a + x.queued, 0),
    failed: minute.reduce((a, s) => a + s.failed, 0),
    ttft50: quantile(ttft, TTFT_BOUNDS, 0.5), ttft95: quantile(ttft, TTFT_BOUNDS, 0.95), tpot50: quantile(tpot, TPOT_BOUNDS, 0.5),
    instances: instances.length,
    serving: instances.filter(e => e.phase === 'serving' && e.breaker === 'closed').length,
  };
}

// -- helpers

export function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node[name] = value;
    else if (value !== false && value !== null && value !== undefined && value !== '') node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.filter(c => c !== null && c !== undefined && c !== ''));
  return node;
}

export function put(node, text) { text = String(text); if (node.textContent !== text) node.textContent = text; }

export function seconds(s) {
  if (s === null || s === undefined) return '–';
  if (s < 0.0995) return `${(s * 1000).toFixed(s < 0.00995 ? 1 : 0)} ms`;
  return s < 0.9995 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(s < 9.95 ? 2 : 1)} s`;
}

export function rate(x) { return x === undefined || x === null ? '–' : x < 9.95 ? x.toFixed(1) : Math.round(x); }

export async function api(path, options) {
  const reply = await fetch(path, options);
  if (!reply.ok) {
    let detail = `${reply.status}`;
    try { const told = (await reply.json()).detail; detail = typeof told === 'string' ? told : JSON.stringify(told); } catch { /* the status says it */ }
    throw Object.assign(new Error(detail), { status: reply.status });
  }
  return reply.headers.get('content-type').startsWith('text/plain') ? reply.text() : reply.json();
}

// Asks before something is changed. `act` does it; what goes wrong is told in the dialog, which then stays.
export function confirmed(title, content, label, act) {
  const dialog = document.getElementById('dialog'), wrong = el('p', { class: 'bad-text', role: 'alert' });
  const go = el('button', { type: 'button', class: 'danger' }, label);
  go.onclick = async () => {
    go.disabled = true;
    try { await act(); dialog.close(); } catch (error) { put(wrong, `It did not work: ${error.message}`); }
    go.disabled = false;
  };
  dialog.replaceChildren(el('h2', {}, title), ...content, wrong,
    el('menu', {}, el('button', { type: 'button', onclick: () => dialog.close() }, 'Cancel'), go));
  dialog.showModal();
}
