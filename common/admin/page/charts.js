// The last fifteen minutes, in steps of five seconds.
import { state, steps, quantile, el, seconds, TTFT_BOUNDS, TPOT_BOUNDS, STEP_S } from './state.js';

const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const SPAN = 180;
// title, what it shows, how a value reads, and lines: (label, colour, of a step, value when nothing ended)
const CHARTS = [
  ['Requests a second', 'Of clients, by how they ended', x => x.toFixed(1), [
    ['answered', '--good-bg', s => s.ok / STEP_S, 0], ['failed', '--bad-bg', s => s.failed / STEP_S, 0],
    ['refused', '--warn-bg', s => s.refused / STEP_S, 0], ['client left', '--quiet', s => s.left / STEP_S, 0]]],
  ['Time to first token', 'Median and 95th percentile of streamed answers', seconds, [
    ['p50', '--seen', s => quantile(s.ttft, TTFT_BOUNDS, 0.5)], ['p95', '--predicted', s => quantile(s.ttft, TTFT_BOUNDS, 0.95)]]],
  ['Time per output token', 'After the first', seconds, [
    ['p50', '--seen', s => quantile(s.tpot, TPOT_BOUNDS, 0.5)], ['p95', '--predicted', s => quantile(s.tpot, TPOT_BOUNDS, 0.95)]]],
  ['Output tokens a second', 'Of answers that ended', x => Math.round(x).toString(), [['tokens', '--seen', s => s.output_tokens / STEP_S, 0]]],
];

class Charts extends HTMLElement {
  connectedCallback() {
    this.className = 'grid';
    this.plots = [];
    for (const [title, what, shown, lines] of CHARTS) {
      const box = el('div', { class: 'chart', role: 'img', 'aria-label': `${title}, last fifteen minutes` });
      this.append(el('section', { class: 'card' }, el('h2', {}, title), el('p', { class: 'quiet small' }, what), box));
      this.plots.push({ box, shown, lines, plot: null });
    }
    this.sizes = new ResizeObserver(() => { for (const p of this.plots) p.plot?.setSize({ width: p.box.clientWidth, height: 190 }); });
    this.sizes.observe(this);
  }

  disconnectedCallback() { this.sizes.disconnect(); for (const p of this.plots) p.plot?.destroy(); }

  show() {
    const rows = steps(SPAN), first = rows.findIndex(([, s]) => s);
    for (const p of this.plots) {
      const values = [rows.map(([t]) => t), ...p.lines.map(([, , of, idle]) => rows.map(([, s], i) => s ? of(s) : first >= 0 && i > first ? idle ?? null : null))];
      if (p.plot) p.plot.setData(values); else p.plot = this.plot(p, values);
    }
  }

  plot({ box, shown, lines }, values) {
    const axis = { stroke: color('--quiet'), grid: { stroke: color('--grid'), width: 1 }, ticks: { show: false }, font: '11px system-ui' };
    return new uPlot({
      width: box.clientWidth, height: 190, legend: { live: true }, cursor: { points: { size: 6 } },
      scales: { y: { range: (_, low, high) => [0, Math.max(high || 0, 1e-3) * 1.1] } },
      axes: [{ ...axis, space: 70, values: (_, ticks) => ticks.map(t => new Date(t * 1000).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit', hour12: false })) }, { ...axis, size: 62, values: (_, ticks) => ticks.map(shown) }],
      series: [{ value: (_, t) => t == null ? '–' : new Date(t * 1000).toLocaleTimeString() }, ...lines.map(([label, name]) => ({
        label, stroke: color(name), width: 1.6, fill: lines.length === 1 ? color(name) + '22' : undefined, spanGaps: false,
        points: { show: false }, value: (_, v) => v == null ? '–' : shown(v) }))],
    }, values, box);
  }
}
customElements.define('hw-charts', Charts);
