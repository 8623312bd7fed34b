"""How the panel looks: JupyterLab's own colours, so that it follows the theme, and boxes that wrap on a narrow page."""

STYLE = """
.memlab-panel { container-type: inline-size; overflow: visible; gap: 0.75rem; padding: 0.25rem; max-width: 90rem; }
.memlab-panel .widget-html-content, .memlab-panel .jupyter-widgets { line-height: 1.4; }
.memlab-panel .widget-html { height: auto; }
.memlab-text, .memlab-repeat, .memlab-search-text,
:is(.memlab-text, .memlab-repeat, .memlab-search-text) > * { display: block; min-width: 0; max-width: 100%; }
.memlab-panel h3, .memlab-panel h4 { margin: 0; font-size: 1.05em; font-weight: 600; color: var(--jp-ui-font-color1); }
.memlab-panel table { border-collapse: collapse; color: var(--jp-ui-font-color1); font-variant-numeric: tabular-nums; }
.memlab-panel pre { margin: 0; padding: 0.4rem 0.6rem; overflow-x: auto; white-space: pre; line-height: 1.35;
  font-family: var(--jp-code-font-family); font-size: var(--jp-code-font-size, 0.8rem);
  color: var(--jp-content-font-color1); background: var(--jp-layout-color2); }
.memlab-panel :focus-visible { outline: 2px solid var(--jp-brand-color1); outline-offset: 1px; }

.memlab-settings { display: grid; gap: 0.75rem; overflow: visible;
  grid-template-columns: repeat(auto-fit, minmax(min(17rem, 100%), 1fr)); }
.memlab-group { border: 1px solid var(--jp-border-color2); border-radius: 0.25rem; padding: 0.5rem 0.6rem; gap: 0.1rem;
  overflow: visible; }
.memlab-column { gap: 0.75rem; overflow: visible; }
.memlab-group > * { width: auto; max-width: 100%; }
.memlab-noted { display: flex; flex-wrap: wrap; align-items: center; justify-content: space-between;
  position: relative; width: 100%; overflow: visible; }
.memlab-noted > .widget-checkbox { width: auto; flex: 0 1 auto; }
.memlab-noted > .jupyter-widgets:not(.widget-checkbox):not(.widget-html) { width: auto; flex: 1 1 12rem; }
.memlab-noted > .jupyter-widgets, .memlab-noted input, .memlab-noted select { min-width: 0; max-width: 100%; }
.memlab-noted > .widget-html { margin: 0; }
.memlab-noted > .widget-html, .memlab-noted > .widget-html > * { position: static; overflow: visible; }
.memlab-noted .widget-html-content { color: var(--jp-ui-font-color2); font-size: 0.9em; }
.memlab-group .widget-checkbox { height: 1.6rem; min-height: 0; margin-top: 0; margin-bottom: 0; }
.memlab-why { position: absolute; inset: 0; cursor: help; }
.memlab-why:focus-visible::after { content: attr(title); position: absolute; z-index: 2; top: 100%; left: 0; right: 0;
  padding: 0.3rem 0.5rem; font-style: normal; white-space: normal; color: var(--jp-ui-font-color1);
  background: var(--jp-layout-color2); border: 1px solid var(--jp-border-color1); }
.memlab-refusal { display: block; }
.memlab-refusal [role="alert"] { border-left: 0.25rem solid var(--jp-error-color1); padding: 0.2rem 0.5rem;
  background: var(--jp-layout-color2); color: var(--jp-ui-font-color1); white-space: normal; }

.memlab-run-bar, .memlab-search-bar, .memlab-actions, .memlab-switches, .memlab-moment-bar {
  display: flex; flex-flow: row wrap; align-items: center; gap: 0.3rem 0.6rem; overflow: visible; }
.memlab-run-bar > .memlab-progress { width: 12rem; }
.memlab-run-bar > .memlab-status, .memlab-search-status { flex: 1 1 100%; }
:is(.memlab-status, .memlab-search-status) .widget-html-content { white-space: normal; overflow-wrap: anywhere; }
:is(.memlab-actions, .memlab-run-bar, .memlab-search-bar, .memlab-moment-bar) > button {
  width: auto; padding: 0 0.8rem; }
.memlab-actions > .memlab-export-folder { width: 18rem; flex: 0 1 18rem; }
.memlab-switches > *, .memlab-moment-bar > .memlab-moment { width: auto; }
.memlab-moment-bar > .memlab-moment-slider { flex: 1 1 16rem; max-width: 40rem; }
.memlab-search-bar > .memlab-search-room { width: 14rem; }
.memlab-search-choice { width: auto; max-width: 44rem; }
.memlab-moment input { width: 8rem; }
.memlab-noted > .memlab-slider { flex: 1 1 12rem; }
.memlab-moment-bar > .widget-label { height: auto; }
.memlab-slider { display: flex; align-items: center; min-height: 1.75rem; }
.memlab-slider > input { flex: 1 1 auto; width: 100%; min-width: 0; margin: 0; accent-color: var(--jp-brand-color1); }

.memlab-chart { width: 100%; min-height: 19rem; overflow: hidden; }
.memlab-tables { display: grid; gap: 0.5rem 2rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); }
.memlab-alive { font-weight: 600; color: var(--jp-ui-font-color1); }
.memlab-tables table { width: 100%; }
.memlab-tables caption { text-align: left; color: var(--jp-ui-font-color2); }
.memlab-tables td { padding: 0.1rem 0.4rem 0.1rem 0; overflow-wrap: anywhere; }
.memlab-tables td + td { text-align: right; white-space: nowrap; }
.memlab-tables i { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.4em; vertical-align: baseline; }

.memlab-runs { display: block; width: 100%; overflow: auto; max-height: 22rem; }
.memlab-runs table { width: 100%; }
.memlab-runs th { position: sticky; top: 0; text-align: right; font-weight: 600; background: var(--jp-layout-color1);
  border-bottom: 1px solid var(--jp-border-color1); }
.memlab-runs th, .memlab-runs td { padding: 0.2rem 0.5rem; white-space: nowrap; }
.memlab-runs td { text-align: right; }
.memlab-runs th:nth-child(2), .memlab-runs td[data-column="settings"], .memlab-runs td[colspan] { text-align: left;
  white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
.memlab-runs tr[data-run] { cursor: pointer; }
.memlab-runs tr[data-run]:hover { background: var(--jp-layout-color2); }
.memlab-runs tr[aria-selected="true"], .memlab-runs tr[aria-selected="true"]:hover {
  background: var(--jp-layout-color3); box-shadow: inset 0.25rem 0 var(--jp-brand-color1); }
.memlab-runs tr.memlab-pinned td[data-column="number"]::before { content: "pinned "; font-weight: 600; }
.memlab-runs tr.memlab-message td { color: var(--jp-ui-font-color1); border-left: 0.25rem solid var(--jp-error-color1);
  padding-bottom: 0.4rem; }

@container (max-width: 52.4rem) {
  .memlab-column { grid-column: 1 / -1; flex-flow: row wrap; }
  .memlab-column > .memlab-group { flex: 1 1 17rem; }
  .memlab-runs table { font-size: 0.92em; }
  .memlab-runs th, .memlab-runs td { white-space: normal; padding: 0.2rem 0.3rem; vertical-align: top; }
  .memlab-runs th:nth-child(2), .memlab-runs td[data-column="settings"] { min-width: 6rem; }
}
"""
