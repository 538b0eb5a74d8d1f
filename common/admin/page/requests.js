// The latest requests of clients, filtered; and one of them: its way through the tiers in time, and why.
import { state, el, put, seconds, api } from './state.js';

const ENDINGS = { complete: '', client_left: 'client left', broke_before_first_byte: 'failed', broke_after_first_byte: 'broken off', refused_here: 'refused' };

class Requests extends HTMLElement {
  connectedCallback() {
    const f = state.filters;
    this.text = el('input', { type: 'search', placeholder: 'id, model, path or server  ( / )', 'aria-label': 'Filter by id, model, path or server', value: f.text });
    const box = (name, label) => {
      const input = el('input', { type: 'checkbox', checked: f[name] });
      input.onchange = () => { f[name] = input.checked; this.read(); };
      return el('label', {}, input, ` ${label}`);
    };
    this.text.oninput = () => { f.text = this.text.value.trim(); clearTimeout(this.soon); this.soon = setTimeout(() => this.read(), 250); };
    this.count = el('span', { class: 'quiet small', role: 'status' });
    this.body = el('tbody', {});
    this.append(el('div', { class: 'filters' }, this.text, box('slow', 'slow'), box('failed', 'not answered well'), this.count),
      el('div', { class: 'card scroll', tabindex: 0, role: 'region', 'aria-label': 'Requests' }, el('table', {}, el('thead', {}, el('tr', {},
        el('th', {}, 'time'), el('th', {}, 'request'), el('th', { class: 'hide-narrow' }, 'model'), el('th', {}, 'status'), el('th', { class: 'num' }, 'first token'),
        el('th', { class: 'num' }, 'all'), el('th', { class: 'num hide-narrow' }, 'tokens in/out'), el('th', {}, 'served by'))), this.body)));
    if (state.focusFilter) { state.focusFilter = false; this.text.focus(); }
    this.at = 0; this.asking = 0;
    this.read();
  }

  show() { if (Date.now() - this.at > 2000 && !this.body.contains(document.activeElement)) this.read(); }

  async read() {
    this.at = Date.now();
    const mine = ++this.asking, f = state.filters;
    const asked = new URLSearchParams({ limit: 100, everywhere: true, clients: true, text: f.text, slow: f.slow, failed: f.failed });
    try {
      const rows = await api(`/admin/v1/requests?${asked}`);
      if (mine !== this.asking || !this.isConnected) return;
      put(this.count, rows.length ? `the latest ${rows.length}` : 'none');
      this.body.replaceChildren(...rows.map(r => this.row(r)));
    } catch (error) { if (mine === this.asking) put(this.count, `no answer: ${error.message}`); }
  }

  row(r) {
    const wrong = r.status >= 500 || r.ending.startsWith('broke') ? 'bad-text' : r.status >= 400 || ENDINGS[r.ending] ? 'warn-text' : '';
    return el('tr', { 'data-id': r.trace_id },
      el('td', {}, new Date(r.time * 1000).toLocaleTimeString()),
      el('td', {}, el('a', { href: `#request/${r.trace_id}`, title: r.trace_id }, r.trace_id.slice(0, 8))),
      el('td', { class: 'hide-narrow' }, r.model),
      el('td', { class: wrong }, [r.status || '–', ENDINGS[r.ending] ?? r.ending, r.attempts > 1 ? `${r.attempts} tries` : ''].filter(Boolean).join(' · ')),
      el('td', { class: `num ${r.slow ? 'warn-text' : ''}` }, seconds(r.ttft_s)),
      el('td', { class: 'num' }, seconds(r.total_s)),
      el('td', { class: 'num hide-narrow' }, `${r.input_tokens} / ${r.output_tokens ?? '–'}`),
      el('td', {}, r.served_by || '–'));
  }
}

class Request_ extends HTMLElement {
  async connectedCallback() {
    const id = this.dataset.id;
    this.append(el('p', {}, el('a', { href: '#requests' }, '← requests')), el('p', { class: 'quiet' }, `Asking all tiers for ${id} …`));
    try {
      const [spans, decisions, words] = await Promise.all([
        api(`/admin/v1/traces/${id}?everywhere=true`), api(`/admin/v1/decisions/${id}?everywhere=true`), api(`/admin/v1/decisions/${id}/words`)]);
      this.children[1].remove();
      this.append(this.summary(decisions, id), this.waterfall(spans), el('section', { class: 'card' }, el('h2', {}, 'Why it went there'), el('pre', { tabindex: 0 }, words)));
    } catch (error) {
      this.children[1].replaceWith(el('p', { role: 'alert' }, error.status === 404 ? 'No tier remembers this request any more.' : `No answer: ${error.message}`));
    }
  }

  show() {}

  summary(decisions, id) {
    const first = decisions.find(d => !d.from_peer) || decisions[0], o = first.outcome;
    const found = new Map(decisions.flatMap(d => d.findings || []).map(f => [f.text, f]));
    const causes = [...found.values()].sort((a, b) => (a.kind === 'later_than_predicted') - (b.kind === 'later_than_predicted') || b.seconds - a.seconds);
    return el('section', { class: 'card' }, el('h2', {}, `${first.model || first.path}: ${o.status} in ${seconds(o.total_s)}`),
      el('p', { class: 'quiet small' }, `${id} · ${first.path}${o.served_by ? ` · served by ${o.served_by}` : ''} · first byte ${seconds(o.ttft_s)}`),
      causes.length ? el('ul', { class: 'findings' }, ...causes.map(f => el('li', {}, f.text))) : el('p', {}, 'Nothing stands out: it took about as long as such a request takes.'));
  }

  waterfall(spans) {
    const card = el('section', { class: 'card' }, el('h2', {}, 'Its way in time')), rows = el('div', { class: 'fall' });
    const ids = new Set(spans.map(s => s.span_id)), children = new Map();
    for (const s of spans) { const p = ids.has(s.parent_id) ? s.parent_id : ''; children.set(p, [...(children.get(p) || []), s]); }
    const start = Math.min(...spans.map(s => s.start_ns)), end = Math.max(...spans.map(s => s.end_ns)), span = Math.max(1, end - start);
    const walk = (parent, depth) => {
      for (const s of (children.get(parent) || []).sort((a, b) => a.start_ns - b.start_ns)) {
        const lane = el('div', { class: 'lane' }), bar = el('b', { class: `k-${s.error ? 'error' : s.kind}` }), took = (s.end_ns - s.start_ns) / 1e9;
        const left = 100 * (s.start_ns - start) / span, width = 100 * (s.end_ns - s.start_ns) / span;
        bar.style.left = `${Math.min(99.5, left)}%`; bar.style.width = `${width}%`;
        const text = el('span', {}, s.kind === 'internal' ? `cost ${(s.attributes?.['headwater.cost'] ?? 0).toFixed(3)}` : seconds(took) + (s.error ? ` · ${s.error}` : ''));
        if (left + width > 70) { text.style.right = `${Math.max(0, 100 - left - (width > 30 ? width : 0))}%`; if (width > 30) text.style.color = '#fff'; } else text.style.left = `${left + width}%`;
        lane.append(bar, text);
        for (const [name, at] of s.events || []) { const mark = el('em', { title: name }); mark.style.left = `${100 * (at - start) / span}%`; lane.append(mark); }
        const name = el('div', { class: 'name', title: `${s.name} [${s.process}]` }, s.name, el('span', { class: 'quiet' }, ` ${s.process}`));
        name.style.paddingLeft = `${depth * 0.9}rem`;
        rows.append(el('div', {}, name, lane));
        walk(s.span_id, depth + 1);
      }
    };
    walk('', 0);
    card.append(rows, el('p', { class: 'quiet small' }, 'Dotted: first byte. Times of different machines are as their own clocks have them.'));
    return card;
  }
}
customElements.define('hw-requests', Requests);
customElements.define('hw-request', Request_);
