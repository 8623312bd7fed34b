// A widget that the page starts late hears the kernel all the same.

/* oxlint-disable no-underscore-dangle -- the names are ipywidgets' */
// anywidget 0.11 (runtime.ts, widget.ts): where a page takes more than 2 s to start a widget, the page shows it, but each
// message of the kernel to it is dropped from then on. Its model then refuses every message, an empty one too.
async function hearKernel(model) {
  // anywidget hands out a part of ipywidgets' model; a listener is given all of it. No widget has a trait "heard".
  let whole = null;
  const keep = (found) => {
    whole = found;
  };
  model.on("change:heard", keep);
  model.set("heard", (model.get("heard") ?? 0) + 1);
  model.off("change:heard", keep);
  // Another host's model than ipywidgets' has no such wait.
  if (!whole?.comm) return;
  try {
    await whole._handle_comm_msg({ content: { data: {} } });
  } catch {
    const handle = Object.getPrototypeOf(Object.getPrototypeOf(whole))._handle_comm_msg;
    whole.comm.on_msg((message) => handle.call(whole, message));
    whole.comm.send({ method: "request_state" });
  }
}

export function hearing(render) {
  return (context) => {
    hearKernel(context.model);
    return render(context);
  };
}
