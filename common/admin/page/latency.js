// Distributions of the last fifteen minutes: what was seen beside what was predicted when the choice was made.
import { summed, quantile, el, seconds, TTFT_BOUNDS, TPOT_BOUNDS } from './state.js';

const KINDS = [['Time to first token', 'ttft', TTFT_BOUNDS], ['Time per output token', 'tpot', TPOT_BOUNDS]];

class Latency extends HTMLElement {
  connectedCallback() { this.className = 'grid'; }

  show() {
    const cards = KINDS.map(([title, name, bounds]) => {
      const seen = summed(180, name), predicted = summed(180, `${name}_predicted`);
      const count = x => x ? x.reduce((a, b) => a + b, 0) : 0;
      const all = [count(seen), count(predicted)];
      const card = el('section', { class: 'card' }, el('h2', {}, title));
      if (!all[0]) { card.append(el('p', { class: 'quiet' }, 'No streamed answer has ended in the last fifteen minutes.')); return card; }
      card.append(el('p', { class: 'small legend' }, `${all[0]} answers`, el('i', { class: 'seen' }), 'seen', el('i', { class: 'predicted' }), 'predicted'));
      const shares = [seen.map(x => x / all[0]), (predicted || seen.map(() => 0)).map(x => x / (all[1] || 1))];
      const used = [...bounds.keys(), bounds.length].filter(i => shares[0][i] || shares[1][i]);
      const from = Math.max(0, used[0] - 1), to = Math.min(bounds.length, used[used.length - 1] + 1);
      const top = Math.max(...shares[0], ...shares[1]);
      const bars = el('div', { class: 'bars', role: 'img', 'aria-label': `${title}: seen median ${seconds(quantile(seen, bounds, 0.5))}, predicted ${seconds(quantile(predicted, bounds, 0.5))}` });
      const ticks = el('div', { class: 'ticks', 'aria-hidden': 'true' });
      for (let i = from; i <= to; i++) {
        const pair = el('div', { title: `${i ? seconds(bounds[i - 1]) : '0'} to ${i < bounds.length ? seconds(bounds[i]) : 'more'}: seen ${(100 * shares[0][i]).toFixed(1)} %, predicted ${(100 * shares[1][i]).toFixed(1)} %` }, el('i', { class: 'seen' }), el('i', { class: 'predicted' }));
        pair.children[0].style.height = `${100 * shares[0][i] / top}%`;
        pair.children[1].style.height = `${100 * shares[1][i] / top}%`;
        bars.append(pair);
        ticks.append(el('span', {}, i < bounds.length ? seconds(bounds[i]) : ''));
      }
      const rows = [0.5, 0.9, 0.95, 0.99].map(q => {
        const s = quantile(seen, bounds, q), p = quantile(predicted, bounds, q);
        return el('tr', {}, el('td', {}, `p${100 * q}`), el('td', { class: 'num' }, seconds(s)), el('td', { class: 'num' }, seconds(p)), el('td', { class: 'num' }, p ? `${(s / p).toFixed(2)}×` : '–'));
      });
      card.append(bars, ticks, el('table', {}, el('thead', {}, el('tr', {}, el('th', {}, ''), el('th', { class: 'num' }, 'seen'), el('th', { class: 'num' }, 'predicted'), el('th', { class: 'num' }, 'seen ÷ predicted'))), el('tbody', {}, ...rows)));
      return card;
    });
    this.replaceChildren(...cards);
  }
}
customElements.define('hw-latency', Latency);
