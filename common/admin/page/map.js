// The tree: regions with their clusters and instances; load, health, weights, who stands in for whom; drain and undrain.
import { state, el, put, seconds, rate, api, confirmed } from './state.js';

const level = x => x >= 0.95 ? 'bad' : x >= 0.75 ? 'warn' : '';
let drains = null;  // path -> mark; null: not known, or this tier offers no draining
let offered = null;  // whether it does

async function readDrains() {
  try {
    offered ??= '/admin/v1/drains' in (await api('/openapi.json')).paths;
    drains = offered ? new Map((await api('/admin/v1/drains')).map(d => [d.path, d])) : null;
  } catch { /* the tier is away; what was known stays until it is back */ }
}

class Map_ extends HTMLElement {
  connectedCallback() { this.parts = new Map(); this.shape = ''; this.asked = 0; this.className = 'world'; }

  show({ picture }) {
    if (Date.now() - this.asked > 3000) { this.asked = Date.now(); readDrains(); }
    const regions = picture.pools[''] ? Object.keys(picture.pools['']?.endpoints) : [];
    const tree = regions.map(r => [r, Object.keys(picture.pools[r]?.endpoints || {}).map(c => [c, Object.keys(picture.pools[`${r}/${c}`]?.endpoints || {})])]);
    const shape = JSON.stringify([tree, drains !== null]);
    if (shape !== this.shape) { this.shape = shape; this.build(tree); }
    for (const [path, part] of this.parts) part(picture, path);
  }

  build(tree) {
    this.parts.clear();
    if (!tree.length) { this.replaceChildren(el('p', { class: 'quiet' }, 'No region is known here yet.')); return; }
    this.replaceChildren(...tree.map(([region, clusters]) => {
      const list = el('div', { class: 'clusters' });
      for (const [cluster, servers] of clusters) {
        const tiles = el('ul', { class: 'servers' }, ...servers.map(id => this.server(`${region}/${cluster}`, id)));
        list.append(el('section', { class: 'cluster', 'aria-label': `cluster ${cluster}` }, this.head('h3', `${region}/${cluster}`, cluster), tiles));
      }
      return el('section', { class: 'region', 'aria-label': `region ${region}` }, this.head('h2', region, region), list);
    }));
  }

  head(tag, path, name) {
    const tags = el('span', {}), facts = el('span', { class: 'facts' }), button = this.drainButton(path);
    this.parts.set(path, picture => {
      const at = path.lastIndexOf('/'), e = picture.pools[at < 0 ? '' : path.slice(0, at)]?.endpoints[name];
      if (!e) return;
      const below = Object.entries(picture.pools).filter(([p]) => (p === path || p.startsWith(path + '/')) && p.split('/').length === 2);
      const servers = below.flatMap(([, pool]) => Object.values(pool.endpoints));
      const busy = servers.reduce((a, s) => a + (s.under_way || 0), 0), room = servers.reduce((a, s) => a + (s.slots || 0), 0);
      const rtt = e.round_trip_s ? ` · ${seconds(e.round_trip_s)} away` : '';
      put(facts, `${rate(state.rates.get(`${at < 0 ? '' : path.slice(0, at)}/${name}`))}/s · ${Math.round(busy)} under way${room ? ` (${Math.round(100 * busy / room)} %)` : ''}${rtt}`);
      const marks = [];
      const over = picture.takeovers.filter(t => t.node === path);
      if (over.length) marks.push(['bad', `run by ${over.map(t => t.by).join(', ')}`]);
      else if (!(e.balancers || []).length && picture.processes.some(p => p.node !== '')) marks.push(['bad', 'no balancer']);
      if (picture.pools[path]?.stale) marks.push(['warn', 'membership stale']);
      if (e.phase !== 'serving') marks.push(['warn', e.phase]);
      if (e.breaker !== 'closed') marks.push(['bad', 'left alone']);
      const text = JSON.stringify(marks);
      if (tags.dataset.marks !== text) {
        tags.dataset.marks = text;
        tags.replaceChildren(...marks.flatMap(([kind, what]) => [el('span', { class: `tag ${kind}` }, what), ' ']));
      }
      button?.update();
    });
    return el('div', { class: 'head' }, el(tag, {}, name), tags, button?.node, facts);
  }

  server(pool, id) {
    const path = `${pool}/${id}`, fill = el('i', {}), where = el('p', { class: 'state' }), load = el('p', {}), speed = el('p', {}), button = this.drainButton(path);
    const tile = el('li', { class: 'server', title: path }, el('h4', {}, id), where, el('div', { class: 'bar' }, fill), load, speed, button?.node);
    this.parts.set(path, picture => {
      const e = picture.pools[pool]?.endpoints[id];
      if (!e) return;
      const used = e.slots ? (e.under_way || 0) / e.slots : 0;
      fill.style.width = `${Math.min(100, 100 * used)}%`;
      fill.className = level(used);
      const gone = e.breaker === 'open', trouble = gone ? 'left alone after failures' : e.breaker === 'half_open' ? 'on trial' : e.phase !== 'serving' ? e.phase : e.failing > 0.05 ? `${Math.round(100 * e.failing)} % fail` : '';
      put(where, trouble); where.hidden = !trouble;
      tile.className = `server ${gone ? 'bad' : trouble ? 'warn' : ''}`;
      put(load, `${Math.round(e.under_way || 0)} of ${Math.round(e.slots)} · ${rate(state.rates.get(path))}/s`);
      put(speed, [e.gpu, e.seconds_per_token ? `${seconds(e.seconds_per_token)}/token` : '', e.weight !== undefined && e.weight !== 1 ? `weight ${e.weight}` : ''].filter(Boolean).join(' · '));
      tile.title = [path, (e.models || []).join(', '), e.kv_utilization != null ? `KV ${Math.round(100 * e.kv_utilization)} %` : '', e.report_age_s != null ? `report ${seconds(e.report_age_s)} old` : 'no report', `speed learned from ${e.learned_from || 0} answers`].filter(Boolean).join('\n');
      button?.update();
    });
    return tile;
  }

  drainButton(path) {
    if (drains === null) return null;
    const node = el('button', { type: 'button', class: 'act' }, 'Drain');
    const update = () => {
      const drained = drains?.has(path);
      put(node, drained ? 'Undrain' : 'Drain');
      node.setAttribute('aria-label', `${drained ? 'Undrain' : 'Drain'} ${path}`);
    };
    node.onclick = () => confirmDrain(path, drains.has(path));
    update();
    return { node, update };
  }
}

function confirmDrain(path, drained) {
  const reason = el('input', { type: 'text', maxlength: 200, 'aria-label': 'reason', placeholder: 'reason, for others to read' });
  const what = el('p', {}, drained ? 'It gets work again, slowly at first.' : 'It gets no new work; what is under way ends in peace.');
  confirmed(`${drained ? 'Undrain' : 'Drain'} ${path}?`, drained ? [what] : [what, reason], drained ? 'Undrain' : 'Drain', async () => {
    if (drained) await api(`/admin/v1/drains/${path.split('/').map(encodeURIComponent).join('/')}`, { method: 'DELETE' });
    else await api('/admin/v1/drains', { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ id: path, reason: reason.value, by: 'console' }) });
    await readDrains();
  });
}

customElements.define('hw-map', Map_);
