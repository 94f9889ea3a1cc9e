// The page: which conversation is shown, which answers are coming, and what the buttons do.

import { Answer } from "./answer.js";
import { models, setKey } from "./api.js";
import { announce, byId, fitHeight, toast } from "./dom.js";
import { showMessages, showSuggestions } from "./messages.js";
import { bindSystemPrompt, samplingFields, setUpSettings } from "./settings.js";
import { showConversations } from "./sidebar.js";
import { watchServer } from "./server.js";
import * as store from "./store.js";

const SUGGESTIONS = [
  ["Explain", "how a rainbow forms, in three sentences"],
  ["Write", "a short poem about the sea at night"],
  ["List", "five ideas for a rainy afternoon"],
  ["Show", "a Python function that reverses a list"],
];
const SAVE_INTERVAL = 1000; // ms, while an answer is coming
const NEAR_END = 80; // pixels from the bottom at which the page follows the text

const conversations = new Map();
const answers = new Map(); // conversation id -> Answer that is coming
let current = store.newConversation(); // listed and kept once it has a message
let lastView = null;
let follows = true;
let modelCards = [];

// The conversation on the screen

function open(conversation) {
  current = conversation;
  sessionStorage.setItem("rvllm.current", conversation.id);
  follows = true;
  bindSystemPrompt(conversation.system, (text) => {
    conversation.system = text;
    if (conversations.has(conversation.id)) save(conversation);
  });
  showCurrent();
  openSidebar(false);
}

function showCurrent() {
  lastView = showMessages(current, messageActions);
  if (answers.has(current.id)) lastView?.update(true);
  byId("title").textContent = current.title || "New chat";
  document.title = current.title ? `${current.title} · rvllm` : "rvllm";
  showState();
  showList();
  scrollToEnd();
}

function showList() {
  showConversations(conversations.values(), current.id, answers, {
    open: (id) => open(conversations.get(id)),
    rename: (id, title) => {
      const conversation = conversations.get(id);
      conversation.title = title;
      save(conversation);
      showCurrent();
    },
    remove,
  });
}

/** What depends on whether an answer is coming, and on how long the conversation is. */
function showState() {
  const running = answers.has(current.id);
  byId("stop").hidden = !running;
  byId("send").hidden = running;
  byId("send").disabled = byId("prompt").value.trim() === "";
  const used = current.messages.findLast((message) => message.stats?.context)?.stats.context;
  const length = modelCards.find((card) => card.id === byId("model").value)?.max_model_len;
  const context = byId("context");
  context.textContent = used ? `${used.toLocaleString("en")}${length ? ` of ${length.toLocaleString("en")}` : ""} tokens of context` : "";
  context.classList.toggle("near", Boolean(length) && used > 0.85 * length);
}

function scrollToEnd() {
  if (follows) byId("scroller").scrollTop = byId("scroller").scrollHeight;
}

function save(conversation) {
  if (!store.saveConversation(conversation)) toast("The browser's storage is full: delete some conversations to keep this one");
}

function remove(id) {
  const conversation = conversations.get(id);
  answers.get(id)?.stop();
  conversations.delete(id);
  store.deleteConversation(id);
  if (current.id === id) startNew();
  else showList();
  byId("new-chat").focus();
  toast("Conversation deleted", "Undo", () => {
    conversations.set(id, conversation);
    save(conversation);
    open(conversation);
  });
}

function startNew() {
  open(store.newConversation());
  byId("prompt").focus();
}

// Answers

const messageActions = {
  regenerate: (index) => {
    current.messages.length = index;
    answer();
  },
  retry: (index) => {
    if (current.messages[index].content) answer(true);
    else messageActions.regenerate(index);
  },
  goOn: (index) => {
    current.messages.length = index + 1;
    answer(true);
  },
  edit: (index, text) => {
    current.messages.length = index;
    current.firstSent = Math.min(current.firstSent, index);
    send(text);
  },
  leaveOut: () => {
    const last = current.messages.findLastIndex((message) => message.role === "user");
    const next = current.messages.findIndex((message, i) => i > current.firstSent && message.role === "user");
    if (next === -1 || current.firstSent >= last) {
      toast("There is nothing left to leave out: shorten the message or the system prompt");
      return;
    }
    current.firstSent = next;
    messageActions.regenerate(current.messages.length - 1);
  },
  enterKey: (index) => askForKey(() => messageActions.regenerate(index)),
};

function send(text) {
  if (answers.has(current.id)) return;
  current.messages.push({ role: "user", content: text });
  if (!current.title) current.title = text.split("\n")[0].slice(0, 80);
  conversations.set(current.id, current);
  answer();
}

/** Lets the model answer the last message, or go on with its own. */
async function answer(goesOn = false) {
  const conversation = current;
  if (answers.has(conversation.id)) return;
  if (!goesOn) conversation.messages.push({ role: "assistant", content: "" });
  const message = conversation.messages.at(-1);
  message.finish = null;
  const body = requestBody(conversation, goesOn);
  let isDrawing = false;
  let savedAt = performance.now();
  const draw = () => {
    isDrawing = false;
    if (current !== conversation || lastView?.message !== message || !answers.has(conversation.id)) return;
    lastView.update(true);
    scrollToEnd();
  };
  const coming = new Answer(message, () => {
    if (!isDrawing) {
      isDrawing = true;
      requestAnimationFrame(draw);
    }
    if (performance.now() - savedAt > SAVE_INTERVAL && conversations.has(conversation.id)) {
      savedAt = performance.now();
      save(conversation);
    }
  });
  answers.set(conversation.id, coming);
  conversation.updated = Date.now();
  follows = true;
  save(conversation);
  showCurrent();
  announce("The model is answering");
  await coming.run(body);
  answers.delete(conversation.id);
  if (!conversations.has(conversation.id)) return; // deleted meanwhile
  save(conversation);
  showList();
  if (current !== conversation) return;
  if (lastView?.message === message) lastView.update(false);
  showState();
  scrollToEnd();
  announce(message.error ? message.error.title : message.content);
  if (message.error?.status === 401) messageActions.enterKey(conversation.messages.length - 1);
}

function requestBody(conversation, goesOn) {
  const sent = conversation.messages.slice(conversation.firstSent);
  const messages = sent.filter((message) => message.content).map(({ role, content }) => ({ role, content }));
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  const body = { messages, ...samplingFields() };
  if (byId("model").value) body.model = byId("model").value;
  if (goesOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return body;
}

// The server

async function showModels() {
  try {
    modelCards = await models();
  } catch (error) {
    if (error.status === 401) askForKey(showModels);
    return;
  }
  const select = byId("model");
  const wanted = store.loadItem("model");
  select.replaceChildren(...modelCards.map((card) => new Option(card.id, card.id, false, card.id === wanted)));
  select.disabled = modelCards.length < 2;
  select.title = select.value;
  showState();
}

function askForKey(then) {
  const dialog = byId("key-dialog");
  byId("key-form").onsubmit = (event) => {
    event.preventDefault();
    setKey(byId("key").value.trim());
    byId("key").value = "";
    dialog.close();
    if (then !== showModels) showModels();
    then();
  };
  if (!dialog.open) dialog.showModal();
}

// Controls around it

function openSidebar(isOpen) {
  byId("sidebar").classList.toggle("open", isOpen);
  byId("scrim").hidden = !isOpen;
  byId("open-sidebar").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) byId("close-sidebar").focus();
}

function openSettings(isOpen) {
  byId("settings").hidden = !isOpen;
  byId("open-settings").setAttribute("aria-expanded", String(isOpen));
  byId(isOpen ? "system" : "open-settings").focus();
}

const THEMES = { "": "light", light: "dark", dark: "" }; // "" is the system's

function showTheme() {
  const theme = document.documentElement.dataset.theme ?? "";
  const label = `Theme: ${theme || "as the system"}`;
  byId("theme").setAttribute("aria-label", label);
  byId("theme").title = label;
}

function nextTheme() {
  const theme = THEMES[document.documentElement.dataset.theme ?? ""];
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  store.saveItem("theme", theme);
  showTheme();
}

function onEscape() {
  if (answers.has(current.id)) answers.get(current.id).stop();
  else if (byId("sidebar").classList.contains("open")) openSidebar(false);
  else if (!byId("settings").hidden) openSettings(false);
}

function setUpControls() {
  const prompt = byId("prompt");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = prompt.value.trim();
    if (!text || answers.has(current.id)) return;
    prompt.value = "";
    fitHeight(prompt);
    send(text);
    prompt.focus();
  });
  prompt.addEventListener("input", () => {
    fitHeight(prompt);
    showState();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("key-dialog").open) onEscape();
  });
  byId("stop").addEventListener("click", () => {
    answers.get(current.id)?.stop();
    prompt.focus();
  });
  byId("new-chat").addEventListener("click", startNew);
  byId("open-sidebar").addEventListener("click", () => openSidebar(true));
  for (const id of ["close-sidebar", "scrim"]) byId(id).addEventListener("click", () => openSidebar(false));
  byId("open-settings").addEventListener("click", () => openSettings(byId("settings").hidden));
  byId("close-settings").addEventListener("click", () => openSettings(false));
  byId("theme").addEventListener("click", nextTheme);
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
  byId("model").addEventListener("change", () => {
    store.saveItem("model", byId("model").value);
    showState();
  });
  const scroller = byId("scroller");
  scroller.addEventListener("scroll", () => {
    follows = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END;
    byId("to-end").hidden = follows;
  });
  byId("to-end").addEventListener("click", () => scroller.scrollTo({ top: scroller.scrollHeight, behavior: "smooth" }));
  addEventListener("storage", (event) => {
    const id = store.conversationOfKey(event.key);
    if (!id || answers.has(id)) return;
    const changed = store.loadConversation(id);
    if (changed) conversations.set(id, changed);
    else conversations.delete(id);
    if (changed && current.id === id) current = changed;
    if (current.id === id) showCurrent();
    else showList();
  });
}

setUpSettings();
setUpControls();
showTheme();
showSuggestions(SUGGESTIONS, send);
for (const conversation of store.loadConversations()) {
  // What was still coming when the page was left has no end.
  for (const message of conversation.messages) if (message.role === "assistant") message.finish ??= "interrupted";
  conversations.set(conversation.id, conversation);
}
open(conversations.get(sessionStorage.getItem("rvllm.current")) ?? current);
byId("prompt").focus();
watchServer(showModels);
