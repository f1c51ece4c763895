"""A tree of tokens that a person goes through: the state under `genctl explore` and `genctl chat`.

How to use it::

    explorer = Explorer.begin(session, prompt, prompt_ids, layers, seed=7, path=Path("tree.jsonl"))
    explorer = Explorer.reopen(session, Path("tree.jsonl"))   # list(explorer.resume()) finishes what was cut short
    for result in explorer.do("generate 20"):                 # results come while the model runs (`results`)
        ...                                                   # explorer.pause(), from another thread, ends it
    explorer.close()

- `language.parse` makes a `Call` of a line, `parse_script` checks a whole script without a model; `COMMANDS` has
  a row for each command. Everything that a key does is one of them; `Explorer.do` takes a line or a Call.
- `explorer.tree` (`nodes.Tree`) is plain values: `nodes[n]` is a token (id, logprob, text, entropy, by …), 0 is the
  root with the prompt. The *cursor* is a node: what happens, happens after it. `under()` is the token that the cursor
  shows: the next one of the current branch, which ends at `tip`; `path(n)`, `children(n)`, `joints[n]`, `depths[n]`,
  `leaves`, `bookmarks`, `knobs`. It changes by changes alone, each a line of the file (`changes`, `journal`).
- `explorer.space` (`workspace.Workspace`): `distribution(node)` is what may follow, by the model and after the
  processors of the current settings, over the whole vocabulary (`distribution.Distribution`: `top`, `at`, `of`,
  `containing`, `why`, `effects`, `entropy`); `text(node)`, `words(node)`, `piece(id)`, `resolved()`;
  `branches.shared(node)` counts columns of the cache, `branches.read_tokens` what went through the model. Run the model
  in one thread; `space.lock` is held while the tree changes.
- `journal.SavedTree` is a tree with its file: what a Workspace and the Story of a chat write with, undo with, and go on
  with after a kill.
- `journal.new_file` names a file in the folder of sessions; `journal.read_tree` reads one without a model.

Log-probabilities are in nats. A tree needs token ids, so servers and encoder-decoders have none.
"""
