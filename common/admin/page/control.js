// What can be changed from here: how processes choose, and rollouts of new versions. Each change is asked about first.
import { state, el, put, api, confirmed } from './state.js';

const json = (method, body) => ({ method, headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) });
const row = (...cells) => el('tr', {}, ...cells.map(c => el('td', {}, c)));
const field = (label, input) => el('label', { class: 'field' }, el('span', {}, label), input);
const number = (name, value, min, max, step) => el('input', { type: 'number', name, value, min, max, step, required: true });

class Control extends HTMLElement {
  connectedCallback() {
    this.className = 'grid';
    this.at = 0;
    this.policies = el('tbody', {});
    this.rollouts = el('tbody', {});
    this.unheard = el('p', { class: 'warn-text', role: 'status' });
    this.noRollouts = el('p', { class: 'quiet' });
    this.append(this.policyCard(), this.rolloutCard());
  }

  show() { if (Date.now() - this.at > 3000) this.read(); }

  async read() {
    this.at = Date.now();
    try {
      const [policies, rollouts] = await Promise.all([api('/admin/v1/policy?everywhere=true'), api('/admin/v1/rollouts')]);
      if (this.isConnected) { this.showPolicies(policies); this.showRollouts(rollouts); }
    } catch { /* the tier is away; what was known stays until it is back */ }
  }

  policyCard() {
    this.name = el('select', { 'aria-label': 'policy' });
    this.where = el('select', { 'aria-label': 'where' });
    const go = el('button', { type: 'button' }, 'Change policy …');
    go.onclick = () => {
      const process = this.where.value, name = this.name.value;
      confirmed(`Choose by ${name}?`,
        [el('p', {}, `${process || 'All processes'} will choose by ${name} from the next request on, until they start anew or \`policy\` in their file changes. What is under way is not touched.`)],
        'Change', async () => { await api('/admin/v1/policy', json('PUT', { name, process, everywhere: true })); await this.read(); });
    };
    return el('section', { class: 'card' }, el('h2', {}, 'Policy'),
      el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'Policies' }, el('table', {}, el('thead', {}, el('tr', {}, el('th', {}, 'process'), el('th', {}, 'chooses by'), el('th', { class: 'num' }, 's per $'))), this.policies)),
      this.unheard, el('div', { class: 'fields' }, field('policy', this.name), field('where', this.where), go));
  }

  showPolicies({ known, processes, unheard }) {
    this.policies.replaceChildren(...processes.map(p => {
      const line = row(p.process, p.name);
      line.append(el('td', { class: 'num' }, String(p.price_weight_s_per_usd)));
      return line;
    }));
    put(this.unheard, unheard ? `${unheard} gave no answer` : '');
    options(this.name, known.map(name => [name, name]), processes[0]?.name);
    options(this.where, [['', 'all processes'], ...processes.map(p => [p.process, p.process])]);
  }

  rolloutCard() {
    const shares = el('input', { name: 'steps', value: '5, 25, 50, 100', required: true, pattern: '[0-9., ]+' });
    shares.oninput = () => shares.setCustomValidity('');
    const form = el('form', { class: 'fields' },
      field('model', el('input', { name: 'model', required: true, maxlength: 512, autocomplete: 'off' })),
      field('to version', el('input', { name: 'to', required: true, maxlength: 64, pattern: '[A-Za-z0-9._\\/\\-]+', autocomplete: 'off' })),
      field('steps, %', shares),
      field('a step, s', number('step_s', 60, 0.1, 86400, 'any')),
      el('button', { type: 'submit' }, 'Start rollout …'));
    form.onsubmit = event => {
      event.preventDefault();
      const given = new FormData(form), model = given.get('model').trim(), to = given.get('to').trim();
      const steps = given.get('steps').split(',').map(s => Number(s.trim())), step_s = Number(given.get('step_s'));
      if (!steps.every((share, i) => share > (steps[i - 1] ?? 0) && share <= 100)) {
        shares.setCustomValidity('Shares must rise, as in 5, 25, 50, 100.');
        shares.reportValidity();
        return;
      }
      confirmed(`Roll ${model} out to ${to}?`,
        [el('p', {}, `Version ${to} gets ${steps.join(', ')} % of the requests for ${model}, each for at least ${step_s} s. It is taken back by itself if more of them fail or first tokens come later.`)],
        'Start', async () => { await api('/admin/v1/rollouts', json('POST', { model, to, steps, step_s })); form.reset(); await this.read(); });
    };
    return el('section', { class: 'card' }, el('h2', {}, 'Rollouts'),
      el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'Rollouts' }, el('table', {}, el('thead', {}, el('tr', {}, ...['model', 'to', 'share', 'stage', ''].map(h => el('th', {}, h)))), this.rollouts)),
      this.noRollouts, form);
  }

  showRollouts(found) {
    put(this.noRollouts, found.length ? '' : 'No rollouts.');
    this.rollouts.parentElement.hidden = !found.length;
    this.rollouts.replaceChildren(...found.map(r => {
      const over = !['waiting', 'stepping'].includes(r.stage), at = `/admin/v1/rollouts/${r.model.split('/').map(encodeURIComponent).join('/')}`;
      const act = el('button', { type: 'button', class: 'act', 'aria-label': `${over ? 'Forget' : 'Abort'} the rollout of ${r.model}` }, over ? 'Forget' : 'Abort');
      act.onclick = () => confirmed(over ? `Forget the rollout of ${r.model}?` : `Abort the rollout of ${r.model}?`,
        [el('p', {}, over ? `Any version of ${r.model} serves it again.` : `All requests for ${r.model} go to the old version again, at once.`)],
        over ? 'Forget' : 'Abort', async () => { await api(at + (over ? '?forget=true' : ''), { method: 'DELETE' }); await this.read(); });
      return row(r.model, r.to, `${r.share} %`, r.stage + (r.reason ? `: ${r.reason}` : ''), act);
    }));
  }
}

// Options that are there already stay, so that a choice that somebody is making is not lost.
function options(select, wanted, first) {
  const shape = JSON.stringify(wanted);
  if (select.dataset.shape === shape) return;
  const chosen = select.dataset.shape ? select.value : first;
  select.dataset.shape = shape;
  select.replaceChildren(...wanted.map(([value, text]) => new Option(text, value)));
  if (chosen !== undefined && wanted.some(([value]) => value === chosen)) select.value = chosen;
}

customElements.define('hw-control', Control);
