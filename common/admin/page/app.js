// The console: follows the live picture and shows one view of it at a time. Every view is a custom element with
// `show(state)`, called once a second; it is built once and changed in place, so that focus and scroll stay.
import { state, rememberRates, totals, el, seconds, rate, api } from './state.js';
import './map.js';
import './charts.js';
import './latency.js';
import './requests.js';
import './control.js';

const VIEWS = { map: 'hw-map', charts: 'hw-charts', latency: 'hw-latency', requests: 'hw-requests', request: 'hw-request', control: 'hw-control' };
const ORDER = ['map', 'charts', 'latency', 'requests', 'control'];
const main = document.getElementById('view');
const link = document.getElementById('link');
const dialog = document.getElementById('dialog');

function shown() {
  const [name, argument] = location.hash.slice(1).split('/');
  return VIEWS[name] ? [name, argument] : ['map', ''];
}

function navigate() {
  const [name, argument] = shown();
  for (const a of document.querySelectorAll('nav a')) {
    const here = a.hash === '#' + name || (name === 'request' && a.hash === '#requests');
    if (here) a.setAttribute('aria-current', 'page'); else a.removeAttribute('aria-current');
  }
  const view = document.createElement(VIEWS[name]);
  if (argument) view.dataset.id = argument;
  main.replaceChildren(view);
  document.title = `Headwater · ${name}`;
  refresh();
}

function refresh() {
  if (!state.picture) return;
  const view = main.firstElementChild;
  if (view && view.show) view.show(state);
  const t = totals();
  const facts = [
    ['requests/s', rate(t.rate)], ['under way', Math.round(t.inFlight)], ['waiting', Math.round(t.queued)],
    ['first token p50', seconds(t.ttft50)], ['p95', seconds(t.ttft95)], ['per token p50', seconds(t.tpot50)],
    ['failed, last minute', t.failed, t.failed > 0], ['instances', `${t.serving} of ${t.instances}`, t.serving < t.instances],
    ['takeovers now', state.picture.takeovers.length, state.picture.takeovers.length > 0],
  ];
  document.getElementById('totals').replaceChildren(...facts.map(([name, value, bad]) =>
    el('div', {}, el('dt', {}, name), el('dd', { class: bad ? 'bad' : '' }, String(value)))));
}

function follow() {
  const source = new EventSource('/admin/v1/events');
  let last = 0;
  source.onopen = async () => {
    try { state.history = new Map((await api('/admin/v1/history?everywhere=true')).map(([age, step]) => [now5() - age, step])); }
    catch { /* the next picture brings the latest steps, and the rest comes with the next connection */ }
  };
  source.onmessage = event => {
    last = Date.now();
    state.picture = JSON.parse(event.data);
    for (const [age, step] of state.picture.steps) state.history.set(now5() - age, step);
    for (const key of state.history.keys()) if (key <= now5() - 180) state.history.delete(key);
    rememberRates();
    told('live', `live, ${state.picture.processes.length} process${state.picture.processes.length === 1 ? '' : 'es'}`);
    refresh();
  };
  source.onerror = () => {
    told('lost', 'connection lost, trying again');
    if (source.readyState === EventSource.CLOSED) { source.close(); setTimeout(follow, 1000); }  // an error's answer: no retry by itself
  };
  const watch = setInterval(() => {
    if (source.readyState === EventSource.CLOSED) clearInterval(watch);
    else if (last && Date.now() - last > 5000) told('lost', `no news for ${Math.round((Date.now() - last) / 1000)} s`);
  }, 1000);
}

const now5 = () => Math.floor(Date.now() / 5000);

function told(kind, text) {
  if (link.dataset.state !== kind || link.textContent !== text) { link.dataset.state = kind; link.textContent = text; }
}

function switchTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === 'dark' ? 'light' : 'dark';
  localStorage.setItem('headwater-theme', root.dataset.theme);
  navigate();
}

function showKeys() {
  const keys = [['1 2 3 4 5', 'map, charts, latency, requests, control'], ['/', 'filter requests'], ['Esc', 'back to the list'], ['t', 'dark or light'], ['?', 'this list']];
  dialog.replaceChildren(el('h2', {}, 'Keys'), el('table', {}, el('tbody', {}, ...keys.map(([key, what]) =>
    el('tr', {}, el('td', {}, ...key.split(' ').map(k => el('kbd', {}, k))), el('td', {}, what))))),
  el('menu', {}, el('button', { type: 'button', onclick: () => dialog.close() }, 'Close')));
  dialog.showModal();
}

document.addEventListener('keydown', event => {
  if (event.ctrlKey || event.altKey || event.metaKey || dialog.open) return;
  if (event.target.matches('input, textarea, select')) { if (event.key === 'Escape') event.target.blur(); return; }
  if (ORDER[event.key - 1]) location.hash = ORDER[event.key - 1];
  else if (event.key === 't') switchTheme();
  else if (event.key === '?') showKeys();
  else if (event.key === '/') { event.preventDefault(); state.focusFilter = true; if (shown()[0] === 'requests') navigate(); else location.hash = 'requests'; }
  else if (event.key === 'Escape' && shown()[0] === 'request') location.hash = 'requests';
});
document.getElementById('theme').onclick = switchTheme;
document.getElementById('keys').onclick = showKeys;
addEventListener('hashchange', () => { navigate(); if (!main.contains(document.activeElement)) main.focus({ preventScroll: true }); });
navigate();
follow();
