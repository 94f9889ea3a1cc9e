// Conversations and settings in localStorage: one entry a conversation, so that two tabs do not undo each other's.

const PREFIX = "rvllm.chat.";
const SETTINGS = "rvllm.settings";

/**
 * A conversation is {id, title, updated, system, firstSent, messages}; firstSent: index of the first message that is
 * still sent. A message is {role, content, reasoning, finish, stats, error}.
 */
export function newConversation() {
  return { id: randomId(), title: "", updated: Date.now(), system: "", firstSent: 0, messages: [] };
}

export function loadConversations() {
  const found = [];
  for (let i = 0; i < localStorage.length; i++) {
    const key = localStorage.key(i);
    const conversation = key.startsWith(PREFIX) ? loadConversation(key.slice(PREFIX.length)) : null;
    if (conversation) found.push(conversation);
  }
  return found;
}

export function loadConversation(id) {
  const value = read(PREFIX + id);
  return value && Array.isArray(value.messages) ? { ...newConversation(), ...value, id } : null;
}

/** False when the browser has no room left. */
export function saveConversation(conversation) {
  return write(PREFIX + conversation.id, conversation);
}

export function deleteConversation(id) {
  localStorage.removeItem(PREFIX + id);
}

export const conversationOfKey = (key) => (key?.startsWith(PREFIX) ? key.slice(PREFIX.length) : null);

export function loadSettings() {
  return read(SETTINGS) ?? {};
}

export function saveSettings(settings) {
  return write(SETTINGS, settings);
}

export function loadItem(name) {
  return localStorage.getItem(`rvllm.${name}`);
}

export function saveItem(name, value) {
  if (value) write(`rvllm.${name}`, value, (text) => text);
  else localStorage.removeItem(`rvllm.${name}`);
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

function write(key, value, encode = JSON.stringify) {
  try {
    localStorage.setItem(key, encode(value));
    return true;
  } catch {
    return false;
  }
}

function randomId() {
  // crypto.randomUUID() exists only on https and localhost.
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
