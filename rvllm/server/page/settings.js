// The sampling controls: which there are, their limits, and the fields of a request they make.

import { byId, el, fitHeight } from "./dom.js";
import { loadSettings, saveSettings } from "./store.js";

const CONTROLS = [
  { name: "temperature", label: "Temperature", value: 0.7, min: 0, max: 2, step: 0.05, help: "0 takes the most likely token every time." },
  { name: "top_p", label: "Top P", value: 0.95, min: 0, max: 1, step: 0.01, help: "Keeps the most likely tokens that add up to this probability." },
  { name: "min_p", label: "Min P", value: 0.05, min: 0, max: 1, step: 0.01, help: "Drops tokens less likely than this share of the best one." },
  { name: "top_k", label: "Top K", value: 0, min: 0, integer: true, help: "Keeps this many tokens; 0 keeps all." },
  { name: "max_tokens", label: "Longest answer", value: 1024, min: 1, integer: true, optional: true, help: "In tokens. Empty: as long as the context allows." },
  { name: "seed", label: "Seed", value: null, min: 0, max: Number.MAX_SAFE_INTEGER, integer: true, optional: true, help: "The same seed gives the same answer. Empty: a new one each time." },
];

let values = {};

export function setUpSettings() {
  const saved = loadSettings();
  values = Object.fromEntries(CONTROLS.map((c) => [c.name, isValid(c, saved[c.name]) ? saved[c.name] : c.value]));
  byId("sampling").append(...CONTROLS.map(fieldOf));
  byId("reset").addEventListener("click", () => {
    values = Object.fromEntries(CONTROLS.map((c) => [c.name, c.value]));
    saveSettings(values);
    byId("sampling").replaceChildren(...CONTROLS.map(fieldOf));
  });
}

/** The fields of a request; what is empty is left to the server. */
export function samplingFields() {
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== null));
}

function isValid(control, value) {
  if (value === null) return Boolean(control.optional);
  if (typeof value !== "number" || !Number.isFinite(value)) return false;
  if (control.integer && !Number.isInteger(value)) return false;
  return value >= control.min && value <= (control.max ?? Number.MAX_SAFE_INTEGER);
}

function fieldOf(control) {
  const id = `setting-${control.name}`;
  const help = el("p", { class: "help", id: `${id}-help`, textContent: control.help });
  const number = el("input", { type: "number", id, min: control.min, max: control.max ?? "", step: control.integer ? 1 : "any", inputMode: control.integer ? "numeric" : "decimal", value: values[control.name] ?? "", aria: { describedby: help.id } });
  if (control.optional) number.placeholder = control.name === "seed" ? "random" : "no limit";
  const range = control.step ? el("input", { type: "range", min: control.min, max: control.max, step: control.step, value: values[control.name], tabIndex: -1, aria: { label: control.label } }) : null;
  const set = (text, other) => {
    // A number field that holds no number gives "", and says so in its validity.
    const value = text === "" && !number.validity.badInput ? null : Number.parseFloat(text);
    const valid = isValid(control, value);
    number.setAttribute("aria-invalid", String(!valid));
    help.classList.toggle("wrong", !valid);
    help.textContent = valid ? control.help : limits(control);
    if (!valid) return;
    values[control.name] = value;
    saveSettings(values);
    if (other) other.value = text;
  };
  number.addEventListener("input", () => set(number.value, range));
  range?.addEventListener("input", () => {
    number.value = range.value;
    set(range.value, null);
  });
  return el("div", { class: "field" }, el("div", { class: "field-line" }, el("label", { htmlFor: id, textContent: control.label }), number), range, help);
}

function limits(control) {
  const kind = control.integer ? "a whole number" : "a number";
  return control.max === undefined || control.max === Number.MAX_SAFE_INTEGER
    ? `Must be ${kind}, at least ${control.min}.`
    : `Must be ${kind} from ${control.min} to ${control.max}.`;
}

/** Shows the system prompt of a conversation; onChange(text) is called as it is edited. */
export function bindSystemPrompt(text, onChange) {
  const area = byId("system");
  area.value = text;
  area.oninput = () => onChange(area.value);
  if (area.value) fitHeight(area);
  else area.style.height = "";
}
