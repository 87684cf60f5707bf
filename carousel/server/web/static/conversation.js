// A conversation is a tree: a message that is edited, or an answer that is asked for again, is a branch beside the one
// that was there. One path through it is shown.
let newest = 0;

export class Turn {
  constructor(parent, role, text) {
    this.id = ++newest;
    this.parent = parent;
    this.role = role;
    this.text = text;
    this.reasoning = "";
    this.tokens = []; // log-probabilities
    this.children = [];
    this.chosen = -1;
    this.answer = null; // of an assistant's: its request, usage, times
  }

  /** A new branch below this message, which is the one that is shown. */
  add(role, text = "") {
    const turn = new Turn(this, role, text);
    this.chosen = this.children.push(turn) - 1;
    return turn;
  }

  /** Show another one of the branches that this message is one of. */
  step(by) {
    const { parent } = this;
    parent.chosen = Math.min(parent.children.length - 1, Math.max(0, parent.chosen + by));
  }
}

export function newConversation() {
  return new Turn(null, "root", "");
}

/** The messages that are shown below `turn`, in order. */
export function shownBelow(turn) {
  const found = [];
  for (let at = turn.children[turn.chosen]; at; at = at.children[at.chosen]) found.push(at);
  return found;
}

/** The messages from the first one to `turn`. */
export function pathTo(turn) {
  const found = [];
  for (let at = turn; at.parent; at = at.parent) found.unshift(at);
  return found;
}
