/* The API's documentation, from its OpenAPI document. */

import { node } from "/assets/answers.js";

const EXAMPLES = {
  "/predict": [
    "curl -F image=@cat.jpg URL/predict",
    "curl -F a=@cat.jpg -F b=@dog.jpg 'URL/predict?top=1'",
    "curl --data-binary @cat.jpg -H 'Content-Type: image/jpeg' URL/predict",
    "curl -H 'Content-Type: application/json' -d '{\"images\": [\"'$(base64 -w0 cat.jpg)'\"]}' URL/predict",
  ],
  "/explain": [
    "curl -F image=@cat.jpg 'URL/explain?format=png' > attention.png",
    "curl -F image=@cat.jpg 'URL/explain?method=relevance&target=cat'",
  ],
  "/embed": ["curl -F image=@cat.jpg URL/embed"],
};

const kind = (schema = {}) => {
  const one = (schema.anyOf ?? [schema]).find((each) => each.type !== "null") ?? {};
  return one.enum ? one.enum.join(" | ") : one.const ?? one.type ?? "";
};

function table(rows) {
  const box = node("div", "table"), made = node("table");
  for (const [name, ...cells] of rows) {
    const row = node("tr"), head = node("th");
    head.scope = "row";
    head.append(node("code", "", name));
    row.append(head, ...cells.map((cell) => node("td", "", cell)));
    made.append(row);
  }
  box.append(made);
  return box;
}

/* The fields of an answer, with those of nested objects. */
function fields(document, schema, prefix = "") {
  const name = schema?.$ref?.split("/").pop(), found = name ? document.components.schemas[name] : schema;
  return Object.entries(found?.properties ?? {}).flatMap(([key, value]) => {
    const options = value.anyOf ?? [value], inner = options.find((each) => each.$ref || each.items?.$ref);
    const nested = inner ? fields(document, inner.$ref ? inner : inner.items, `${prefix}${key}${inner.items ? "[]" : ""}.`) : [];
    return [[prefix + key, inner ? (inner.items ? "array" : "object") : kind(value), value.description ?? ""], ...nested];
  });
}

function article(document, path, method, operation) {
  const made = node("article"), title = node("h2");
  title.append(node("span", `verb ${method}`, method.toUpperCase()), path);
  made.append(title, node("p", "", operation.description ?? operation.summary));
  if (EXAMPLES[path]) made.append(node("pre", "", EXAMPLES[path].join("\n").replaceAll("URL", location.origin)));
  const parameters = (operation.parameters ?? []).map((each) => [each.name, kind(each.schema), each.description ?? each.schema.description ?? ""]);
  if (parameters.length) made.append(node("h3", "", "Query"), table(parameters));
  if (operation.requestBody) made.append(node("h3", "", "Body"), table(Object.keys(operation.requestBody.content).map((type) => [type, {
    "multipart/form-data": "one file or several, under any field names",
    "application/json": '{"images": ["<base64>", …]}',
    "image/*": "the bytes of one image",
  }[type] ?? ""])));
  const answer = operation.responses["200"]?.content?.["application/json"]?.schema;
  if (answer) made.append(node("h3", "", "Answer"), table(fields(document, answer)));
  const errors = Object.entries(operation.responses).filter(([status]) => status !== "200");
  made.append(node("h3", "", "Errors"), table(errors.map(([status, { description }]) => [status, description])));
  return made;
}

const document_ = await (await fetch("/openapi.json")).json();
document.getElementById("about").textContent = `vitrail ${document_.info.version}. Errors are JSON: {"error": {"code", "message", "image"}}. With an API key, send it as "Authorization: Bearer KEY".`;
const order = ["/predict", "/explain", "/embed"];
const rank = (path) => (order.includes(path) ? order.indexOf(path) : order.length);
const paths = Object.entries(document_.paths).sort(([a], [b]) => rank(a) - rank(b));
for (const [path, methods] of paths) {
  for (const [method, operation] of Object.entries(methods)) document.getElementById("operations").append(article(document_, path, method, operation));
}
